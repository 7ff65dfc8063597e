"""Tenants: who calls, and what each may do.

An API key is `psk_<id>_<secret>`. The id (12 hex digits) is public: it finds the entry, and names the key in lists.
The secret is 32 random bytes, so plain SHA-256 protects it well enough; a slow hash helps only where secrets can be
guessed.
"""

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from penstock.ingest.errors import ApiError
from penstock.messages import Tenant, Weight
from penstock.names import CLASSES, PriorityClass
from penstock.regions import is_region_name

_KEY_PATTERN = re.compile(r"psk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_NO_HASH = "0" * 64


def _check_region_name(name: str) -> str:
    if not is_region_name(name):
        raise ValueError(f"{name!r} cannot name a region: 1 to 32 of a-z 0-9 -, first a letter")
    return name


RegionName = Annotated[str, AfterValidator(_check_region_name)]


@dataclass(frozen=True)
class Caller:
    """The tenant that makes a request. It is derived from the API key alone, never from the request's content."""

    tenant: str = "default"
    classes: tuple[PriorityClass, ...] = CLASSES
    """The classes that its requests may have."""
    weight: float = 1.0
    """Its share of the pipeline while tenants compete."""
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    """Prompt and output tokens together."""
    max_request_tokens: int | None = None
    """The most output tokens that one request may ask for; answers without a limit end there."""
    max_batch_tokens: int | None = None
    """The most tokens, prompt and output together, of all its batches that have not ended."""
    regions: tuple[str, ...] = ()
    """The regions that may have its data; empty: no list of them."""
    topics: Literal["shared", "own"] = "shared"
    fallback: bool = False
    """Whether endpoints may answer its requests where the own workers cannot in time."""
    key: str = ""
    """The id of its API key; empty where none is needed."""

    @property
    def has_own_topics(self) -> bool:
        """Whether its data stays: its requests, results and dead letters are in topics of its own."""
        return self.topics == "own" or bool(self.regions)


class TenantEntry(BaseModel):
    """A stored tenant. One without an entry has these defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: tuple[PriorityClass, ...] = CLASSES
    weight: Weight = 1.0
    requests_per_min: int | None = Field(default=None, ge=1)
    tokens_per_min: int | None = Field(default=None, ge=1)
    max_request_tokens: int | None = Field(default=None, ge=1)
    max_batch_tokens: int | None = Field(default=None, ge=1)
    regions: tuple[RegionName, ...] = ()
    """The regions that may have its data. With any, its topics are its own."""
    topics: Literal["shared", "own"] = "shared"
    fallback: bool = False
    """Whether endpoints may answer its requests where the own workers cannot in time."""
    webhook_url: str = Field(default="", repr=False)
    """Where its events go; empty: where PENSTOCK_WEBHOOK_URL says."""

    def make_caller(self, tenant: str, key: str = "") -> Caller:
        """Return the caller that this tenant is, with a key of this id."""
        return Caller(
            tenant, key=key, **{name: getattr(self, name) for name in type(self).model_fields if name != "webhook_url"}
        )


class KeyEntry(BaseModel):
    """A stored API key: its tenant, and the hash of its secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: Tenant
    hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the secret, hex."""
    created: float = 0.0
    """Seconds since the epoch."""


class KeySource(Protocol):
    """Where keys and tenants are stored. Methods raise `BusUnavailable` while that cannot be reached."""

    async def find_key(self, key_id: str) -> KeyEntry | None:
        """Return the entry of a key, or None."""

    async def find_tenant(self, name: str) -> TenantEntry:
        """Return the limits of a tenant; the defaults if it has no entry."""


def list_allowed_regions(caller: Caller, own: str) -> frozenset[str] | None:
    """Return the regions that may have a caller's data; None where all may. `own` is the region that is asked.

    A tenant with topics of its own and without a list of regions stays in the one that it asks.
    """
    return frozenset(caller.regions or (own,)) if caller.has_own_topics else None


def check_residency(caller: Caller, own: str, *, has_kafka: bool) -> None:
    """Raise `ApiError` 403 where the region `own` may not have a caller's data, or cannot keep it apart."""
    allowed = list_allowed_regions(caller, own)
    if allowed is not None and own not in allowed:
        where = f"this is {own!r}" if own else "this one has no name (PENSTOCK_REGION_NAME)"
        names = ", ".join(sorted(allowed))
        message = (
            f"The data of {caller.tenant!r} stays in: {names}. None of these regions can take it now, and {where}."
        )
        raise ApiError(403, message, code="region_not_allowed")
    if allowed is not None and not has_kafka:
        message = f"The data of {caller.tenant!r} stays in topics of its own, which need Kafka: see PENSTOCK_KAFKA."
        raise ApiError(403, message, code="own_topics_need_kafka")


def make_key(tenant: str) -> tuple[str, str, KeyEntry]:
    """Return a new key as its owner gets it, its id, and the entry to store."""
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    entry = KeyEntry(tenant=tenant, hash=hash_secret(secret), created=round(time.time(), 3))
    return f"psk_{key_id}_{secret}", key_id, entry


def hash_secret(secret: str) -> str:
    """Return the stored form of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


class Keyring:
    """Identifies callers by their keys. Without a source every caller is the tenant `default`, and needs no key."""

    def __init__(self, source: KeySource | None = None) -> None:
        self._source = source

    @property
    def is_open(self) -> bool:
        """Whether callers need no key."""
        return self._source is None

    async def authenticate_caller(self, authorization: str | None) -> Caller:
        """Return the caller that sends this `Authorization` header.

        Raises `ApiError` 401, which is the same for a key that never existed, was revoked, or has a wrong secret;
        `BusUnavailable` while keys are in Redis and that is away.
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
        return (await self._source.find_tenant(entry.tenant)).make_caller(entry.tenant, match[1] if match else "")


def _unauthorized_error(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
