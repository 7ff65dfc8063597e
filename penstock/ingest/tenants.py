"""Tenants: who calls, and what they may do.

An API key is `psk_<id>_<secret>`. The id (12 hex digits) is public: it finds the entry, and names the key in lists. The
secret is 32 random bytes, so plain SHA-256 keeps it well at rest: a slow hash helps where secrets can be guessed.
"""

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from penstock.ingest.errors import ApiError
from penstock.messages import Tenant, Weight
from penstock.names import CLASSES, PriorityClass

_KEY_PATTERN = re.compile(r"psk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_NO_HASH = "0" * 64


@dataclass(frozen=True)
class Caller:
    """Who makes a request: derived from the API key alone, never from what the request says."""

    tenant: str = "default"
    classes: tuple[PriorityClass, ...] = CLASSES
    """Which classes its requests may have."""
    weight: float = 1.0
    """Its share of the pipeline where tenants compete."""
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    """Prompt and output tokens together."""
    max_request_tokens: int | None = None
    """The most output tokens that one request may ask for; answers without a limit end there."""
    max_batch_tokens: int | None = None
    """Of all its batches that are not over, prompt and output tokens together."""


class TenantEntry(BaseModel):
    """What is set down of a tenant. One that is not set down has the defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: tuple[PriorityClass, ...] = CLASSES
    weight: Weight = 1.0
    requests_per_min: int | None = Field(default=None, ge=1)
    tokens_per_min: int | None = Field(default=None, ge=1)
    max_request_tokens: int | None = Field(default=None, ge=1)
    max_batch_tokens: int | None = Field(default=None, ge=1)

    def make_caller(self, tenant: str) -> Caller:
        """The tenant as it calls."""
        return Caller(tenant, **{name: getattr(self, name) for name in type(self).model_fields})


class KeyEntry(BaseModel):
    """What is set down of an API key: whose it is, and the hash of its secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: Tenant
    hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the secret, hex."""
    created: float = 0.0
    """Seconds since the epoch."""


class KeySource(Protocol):
    """Where keys and tenants are set down. Raises `BusUnavailable` where that is away."""

    async def find_key(self, key_id: str) -> KeyEntry | None:
        """The key of an id."""

    async def find_tenant(self, name: str) -> TenantEntry:
        """What a tenant may do."""


def make_key(tenant: str) -> tuple[str, str, KeyEntry]:
    """A key as its owner gets it, its id, and what is set down of it."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    entry = KeyEntry(tenant=tenant, hash=hash_secret(secret), created=round(time.time(), 3))
    return f"psk_{key_id}_{secret}", key_id, entry


def hash_secret(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Keyring:
    """Tells callers by their keys. Without a source everybody is the tenant `default`, and no key is asked for."""

    def __init__(self, source: KeySource | None = None) -> None:
        self._source = source

    @property
    def is_open(self) -> bool:
        """Whether anybody may call."""
        return self._source is None

    async def authenticate_caller(self, authorization: str | None) -> Caller:
        """Who sends this `Authorization` header.

        Raises `ApiError` 401, the same for a key that never was, was revoked, or has a wrong secret; `BusUnavailable`
        where keys are in Redis and that is away.
        """
        if self._source is None:
            return Caller()
        scheme, _, text = (authorization or "").partition(" ")
        match = _KEY_PATTERN.fullmatch(text.strip())
        if scheme.lower() != "bearer" or not text.strip():
            raise _unauthorized_error("no API key: send it as 'Authorization: Bearer psk_…'")
        entry = await self._source.find_key(match[1]) if match else None
        # Compared in any case, in a time that tells nothing of where they differ.
        is_same = hmac.compare_digest(hash_secret(match[2] if match else ""), entry.hash if entry else _NO_HASH)
        if entry is None or not is_same:
            raise _unauthorized_error("this API key is not valid")
        return (await self._source.find_tenant(entry.tenant)).make_caller(entry.tenant)


def _unauthorized_error(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
