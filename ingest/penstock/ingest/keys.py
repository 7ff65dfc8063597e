"""Where API keys and tenants are stored: a JSON or TOML file, or Redis.

{"tenants": {"acme": {"weight": 3, "requests_per_min": 600}}, "keys": {"<id>": {"tenant": "acme", "hash": "…"}}}
"""

import asyncio
import json
import logging
import os
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, cast

import redis
import redis.asyncio
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.config.settings import AdmissionSettings, is_loopback
from penstock.errors import SettingsError
from penstock.ingest.tenants import KeyEntry, KeySource, TenantEntry
from penstock.messages import Tenant
from penstock.names import KEYS_KEY, TENANTS_KEY
from penstock.redis.client import translate_outages

log = logging.getLogger(__name__)

CACHE_TTL_S = 1.0
"""How long entries are cached: a revoked key can be used for another second."""
MAX_CACHED_ENTRIES = 10_000
KEYS_IN_REDIS, KEYS_OPEN = "redis", "open"
"""The values of the setting that are not a path."""

E = TypeVar("E", bound=BaseModel)


class KeyBook(BaseModel):
    """All keys and tenants."""

    model_config = ConfigDict(extra="forbid")

    tenants: dict[Tenant, TenantEntry] = {}
    keys: dict[str, KeyEntry] = {}


def open_key_source(settings: AdmissionSettings, host: str, client: "redis.asyncio.Redis") -> KeySource | None:
    """Return where a gateway that listens on `host` looks keys up, or None for an open gateway.

    Raises `SettingsError` for a file that cannot be read, and for an open gateway that other hosts can reach, unless
    the setting is `open`.
    """
    if settings.keys == KEYS_OPEN or (not settings.keys and is_loopback(host)):
        return None
    if not settings.keys:
        raise SettingsError(
            f"the gateway would be open to everybody who reaches {host}: set PENSTOCK_GATEWAY_KEYS to a file of keys, "
            f"to {KEYS_IN_REDIS!r}, or to {KEYS_OPEN!r} if that is what you want"
        )
    return RedisKeys(client) if settings.keys == KEYS_IN_REDIS else FileKeys(Path(settings.keys))


class FileKeys:
    """Keys in a file, which is read again when it changes. While it cannot be read, its last content is used."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()
        self._book, self._version = read_book_file(self._path), _file_version(self._path)
        self._checked_at = time.monotonic()

    async def find_key(self, key_id: str) -> KeyEntry | None:
        """Return the entry of a key, or None."""
        await self._reload_if_changed()
        return self._book.keys.get(key_id)

    async def find_tenant(self, name: str) -> TenantEntry:
        """Return the limits of a tenant; the defaults if it has no entry."""
        await self._reload_if_changed()
        return self._book.tenants.get(name, TenantEntry())

    async def _reload_if_changed(self) -> None:
        if time.monotonic() < self._checked_at + CACHE_TTL_S:
            return
        self._checked_at = time.monotonic()
        try:
            mark = await asyncio.to_thread(_file_version, self._path)
            if mark != self._version:
                self._book, self._version = await asyncio.to_thread(read_book_file, self._path), mark
        except (OSError, SettingsError) as error:
            log.error("reading the keys again failed, the old ones stay: %s", error)


class RedisKeys:
    """Keys in two hashes on the stream server. Each entry is cached for a second."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client
        self._cache: dict[tuple[str, str], tuple[float, str | None]] = {}

    async def find_key(self, key_id: str) -> KeyEntry | None:
        """Return the entry of a key, or None."""
        return _parse_entry(KeyEntry, await self._read_field(KEYS_KEY, key_id))

    async def find_tenant(self, name: str) -> TenantEntry:
        """Return the limits of a tenant; the defaults if it has no entry."""
        return _parse_entry(TenantEntry, await self._read_field(TENANTS_KEY, name)) or TenantEntry()

    async def _read_field(self, table: str, field: str) -> str | None:
        until, text = self._cache.get((table, field), (0.0, None))
        if time.monotonic() < until:
            return text
        with translate_outages():
            raw = cast("bytes | None", await self._client.hget(table, field))
        if len(self._cache) >= MAX_CACHED_ENTRIES:  # somebody tries out ids
            self._cache.clear()
        text = None if raw is None else raw.decode()
        self._cache[table, field] = (time.monotonic() + CACHE_TTL_S, text)
        return text


def _parse_entry(kind: type[E], text: str | None) -> E | None:
    return None if text is None else kind.model_validate_json(text)


# For `penstock keys`.


def read_redis_book(client: "redis.Redis") -> KeyBook:
    """Return all keys and tenants in Redis."""
    tables = [cast("Mapping[bytes, bytes]", client.hgetall(table)) for table in (KEYS_KEY, TENANTS_KEY)]
    keys, tenants = ({name.decode(): json.loads(raw) for name, raw in table.items()} for table in tables)
    return KeyBook.model_validate({"keys": keys, "tenants": tenants})


def read_book_file(path: Path) -> KeyBook:
    """Return all keys and tenants in a file. Raises `SettingsError`."""
    try:
        raw = path.read_bytes()
        return KeyBook.model_validate(tomllib.loads(raw.decode()) if path.suffix == ".toml" else json.loads(raw))
    except (OSError, ValueError, ValidationError) as error:
        raise SettingsError(f"{path}: {error}") from None


def write_book_file(path: Path, book: KeyBook) -> None:
    """Replace a file in one step, readable by its owner alone. Raises `SettingsError` for TOML."""
    if path.suffix == ".toml":
        raise SettingsError(f"{path}: a TOML file is edited by hand; penstock writes JSON")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        file.write(book.model_dump_json(indent=1, exclude_defaults=True) + "\n")
        file.flush()
        os.fsync(handle)
    os.replace(name, path)


def _file_version(path: Path) -> tuple[int, int, int]:
    """Return a value that differs when the file was changed or replaced."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino
