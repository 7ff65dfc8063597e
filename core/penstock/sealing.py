"""Encrypts the content of tenants that have a key, wherever it outlives a process, so that a dropped key erases it.

`PENSTOCK_TENANT_KEYS` names a directory, such as a mounted secret:

    TENANT           its keys, one a line, 32 bytes each in hex, the newest last: that one encrypts, all of them decrypt
    TENANT.erased    says that the keys that are not in `TENANT` were dropped for good; its content says nothing

A tenant without either file is stored in clear. Content under a key that is in neither file cannot be read *yet*: the
secret may not be mounted or not be up to date. It waits (`TenantKeyMissing`). With `TENANT.erased` it is
`ContentErased`, for good. A process whose files vanish or are damaged without that goes on with the keys that it had;
if the whole directory is gone, also with what it knew of tenants in clear.

A sealed message is JSON that begins with `{"sealed":"<key id>"`, with what has to be in clear beside it, and `data`:
base64 of a nonce of 12 bytes, the ciphertext and a tag of 16 (AES-256-GCM). Its key is made of the tenant's by one step
of HKDF (`_derive_key`), for one kind of content, tenant and id: what is moved to another id cannot be opened.
`docs/security.md` has the format for programs in other languages.

The keys are the process's own: each entry point sets them once with `use_tenant_keys`, and all that it encodes and
decodes goes by them. Without them this module imports nothing and costs a comparison.
"""

import base64
import hashlib
import hmac
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ContentErased, DependencyMissing, InvalidRequest, SettingsError, TenantKeyMissing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

log = logging.getLogger(__name__)

SETTING = "PENSTOCK_TENANT_KEYS"
ERASED_SUFFIX = ".erased"
REFRESH_S = 5.0
"""How long what a tenant's files say is kept: a new key, or one that was dropped, counts after this."""
NONCE_BYTES, TAG_BYTES, KEY_ID_CHARS = 12, 16, 12
MAX_KNOWN_TENANTS = 10_000
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SEALED_START = b'{"sealed":'


class TenantKeys(NamedTuple):
    """The keys of one tenant, by id, the newest last."""

    by_id: Mapping[str, bytes]
    is_erased: bool
    """Whether all other keys of it were dropped."""


class Sealer(NamedTuple):
    """Encrypts one kind of content of one id."""

    key_id: str
    tenant: str
    cipher: "AESGCM"

    def encrypt_content(self, plain: bytes | memoryview, bound: bytes = b"") -> bytes:
        """Return nonce, ciphertext and tag. It opens only where the same bytes are `bound` to it."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self.cipher.encrypt(nonce, plain, bound)

    def encode_sealed(self, plain: bytes, clear: Mapping[str, Any], bound: bytes = b"") -> bytes:
        """Return sealed JSON with the members `clear` beside it."""
        data = base64.b64encode(self.encrypt_content(plain, bound)).decode()
        body = {"sealed": self.key_id, "tenant": self.tenant, **clear, "data": data}
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


class Keyring:
    """The keys in a directory. Any thread may call its methods."""

    def __init__(self, directory: Path) -> None:
        """Raise `SettingsError` for what is no directory, `DependencyMissing` without `cryptography`."""
        try:
            import cryptography  # noqa: F401
        except ImportError:
            raise DependencyMissing(f"{SETTING} needs pip install 'penstock[sealing]'") from None
        if not directory.is_dir():
            raise SettingsError(f"{SETTING}: {directory} is not a directory that can be read")
        self.directory = directory
        self._known: dict[str, tuple[float, TenantKeys]] = {}

    def find_keys(self, tenant: str) -> TenantKeys:
        """Return a tenant's keys; none where it is stored in clear. Raises `TenantKeyMissing`, and `InvalidRequest` for
        what names no tenant.
        """
        if _TENANT.fullmatch(tenant) is None:
            raise InvalidRequest(f"{tenant[:80]!r} names no tenant")
        if tenant.endswith(ERASED_SUFFIX):
            raise InvalidRequest(f"{SETTING}: a tenant's name must not end in {ERASED_SUFFIX}, as {tenant!r} does")
        known = self._known.get(tenant)
        now_s = time.monotonic()
        if known is not None and now_s < known[0]:
            return known[1]
        try:
            found = self._read_keys(tenant, has_had_keys=known is not None and bool(known[1].by_id))
        except TenantKeyMissing as error:
            # A file that is damaged may be the first key of a tenant that was in clear: that is not written in clear.
            if known is None or (not known[1].by_id and self.directory.is_dir()):
                raise
            log.warning("%s; what was there is used until then", error)
            found = known[1]
        if len(self._known) > MAX_KNOWN_TENANTS:
            self._known = {name: one for name, one in list(self._known.items()) if one[1].by_id}  # others add to it
        self._known[tenant] = now_s + REFRESH_S, found
        return found

    def _read_keys(self, tenant: str, *, has_had_keys: bool) -> TenantKeys:
        path = self.directory / tenant
        try:
            if not self.directory.is_dir():
                raise TenantKeyMissing(f"{SETTING}: {self.directory} is gone: mount it again")
            lines = path.read_text("ascii").split() if path.exists() else []
            keys = [bytes.fromhex(line) for line in lines]
            is_erased = path.with_name(tenant + ERASED_SUFFIX).exists()
        except (OSError, ValueError) as error:
            raise TenantKeyMissing(f"{SETTING}: {path} cannot be read: {type(error).__name__}") from None
        if any(len(key) != 32 for key in keys) or (path.exists() and not keys):
            raise TenantKeyMissing(f"{SETTING}: {path} needs one key a line, each 64 hex digits")
        if has_had_keys and not keys and not is_erased:
            raise TenantKeyMissing(
                f"{SETTING}: {path} is gone; mount it again, or make {path}{ERASED_SUFFIX} to erase what the tenant has"
            )
        return TenantKeys({name_key(key): key for key in keys}, is_erased)


_keyring: Keyring | None = None


def use_tenant_keys(directory: str) -> None:
    """Have this process go by the keys of a directory; with an empty name it stays as it is. Raises as `Keyring`."""
    global _keyring  # noqa: PLW0603 (of the process, as its traces are)
    if directory and (_keyring is None or _keyring.directory != Path(directory)):
        _keyring = Keyring(Path(directory))


def forget_tenant_keys() -> None:
    """Have this process store everything in clear again, for tests."""
    global _keyring  # noqa: PLW0603
    _keyring = None


def has_tenant_keys() -> bool:
    """Return whether this process goes by tenants' keys."""
    return _keyring is not None


def name_key(key: bytes) -> str:
    """Return the id of a key, which stands in clear beside what it encrypts."""
    return hashlib.sha256(b"penstock key id" + key).hexdigest()[:KEY_ID_CHARS]


def _find_keys(tenant: str) -> TenantKeys | None:
    """Return the keys of a tenant whose content is sealed, else None. Raises `ContentErased`, `TenantKeyMissing`."""
    if _keyring is None:
        return None
    keys = _keyring.find_keys(tenant)
    if not keys.by_id and keys.is_erased:
        raise ContentErased(f"the key of the tenant {tenant!r} was dropped: nothing of it is stored any more")
    return keys if keys.by_id else None


def _find_key(tenant: str, key_id: str) -> bytes:
    if _keyring is None:
        raise TenantKeyMissing(f"content of the tenant {tenant!r} is encrypted: set {SETTING}")
    keys = _keyring.find_keys(tenant)
    if (key := keys.by_id.get(key_id)) is not None:
        return key
    if keys.is_erased:
        raise ContentErased(f"the key {key_id} of the tenant {tenant!r} was dropped: what it encrypted is erased")
    raise TenantKeyMissing(f"content of the tenant {tenant!r} has the key {key_id}, which is not in {SETTING}")


def _derive_key(key: bytes, kind: str, tenant: str, name: str) -> bytes:
    """Return the key for one kind of content of one id: HKDF-Expand with SHA-256, 32 bytes."""
    return hmac.digest(key, f"penstock\n{kind}\n{tenant}\n{name}".encode() + b"\x01", "sha256")


@lru_cache(maxsize=4096)  # a stream's tokens are opened one by one
def _make_cipher(key: bytes, kind: str, tenant: str, name: str) -> "AESGCM":
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(_derive_key(key, kind, tenant, name))


def find_sealer(kind: str, tenant: str, name: str) -> Sealer | None:
    """Return what encrypts one kind of content of an id; None for a tenant without a key.

    Raises `ContentErased` and `TenantKeyMissing`.
    """
    keys = _find_keys(tenant)
    if keys is None:
        return None
    key_id, key = list(keys.by_id.items())[-1]
    return Sealer(key_id, tenant, _make_cipher(key, kind, tenant, name))


def open_data(kind: str, tenant: str, name: str, key_id: str, data: bytes | memoryview, bound: bytes = b"") -> bytes:
    """Return what `Sealer.encrypt` was given. Raises `ContentErased`, `TenantKeyMissing`, or `InvalidRequest` for what
    was changed, or belongs to another id.
    """
    from cryptography.exceptions import InvalidTag

    cipher = _make_cipher(_find_key(tenant, key_id), kind, tenant, name)
    try:
        return cipher.decrypt(bytes(data[:NONCE_BYTES]), data[NONCE_BYTES:], bound)
    except (InvalidTag, ValueError):
        raise InvalidRequest(f"the sealed {kind} of {name!r} was changed, or belongs to another id") from None


# Messages.


def is_sealed(value: bytes) -> bool:
    """Return whether a message is sealed."""
    return value.startswith(SEALED_START)


def seal_message(kind: str, tenant: str, name: str, plain: bytes, clear: Mapping[str, Any] | None = None) -> bytes:
    """Return a message's JSON sealed, with some of it in clear; as it is for a tenant without a key.

    Raises `ContentErased` and `TenantKeyMissing`.
    """
    sealer = None if _keyring is None or is_sealed(plain) else find_sealer(kind, tenant, name)
    return plain if sealer is None else sealer.encode_sealed(plain, {"kind": kind, "id": name, **(clear or {})})


def open_message(body: Mapping[str, Any], kind: str) -> bytes:
    """Return the JSON of a sealed message of a kind, by its members (`read_envelope`).

    Raises `ContentErased`, `TenantKeyMissing`, or `InvalidRequest` for what cannot be opened.
    """
    if body["kind"] != kind:
        raise InvalidRequest(f"a sealed {body['kind']!s:.20} in place of a {kind}")
    return open_data(kind, body["tenant"], body["id"], body["sealed"], _decode_data(body["data"]))


def read_envelope(value: bytes) -> dict[str, Any]:
    """Return the members of a sealed message. Raises `InvalidRequest` for what is none."""
    try:
        body = json.loads(value)
        if all(isinstance(body[name], str) for name in ("sealed", "kind", "id", "tenant", "data")):
            return dict(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise InvalidRequest("a sealed message without one of sealed, kind, id, tenant and data")


def read_clear_part(value: bytes) -> bytes:
    """Return the JSON of what a sealed message has in clear, as far as it is the message's own."""
    body = read_envelope(value)
    return json.dumps({name: one for name, one in body.items() if name not in ("sealed", "kind", "data")}).encode()


def find_tenant(value: bytes) -> str:
    """Return the tenant of a sealed message; the default one for any other."""
    try:
        tenant = str(read_envelope(value)["tenant"]) if is_sealed(value) else ""
    except InvalidRequest:
        tenant = ""
    return tenant if _TENANT.fullmatch(tenant) else "default"


def has_key_of(value: bytes) -> bool:
    """Return False for a sealed message whose key is not here yet. What is erased, or no message, can be settled."""
    try:
        if is_sealed(value):
            body = read_envelope(value)
            _find_key(body["tenant"], body["sealed"])
    except TenantKeyMissing:
        return False
    except (ContentErased, InvalidRequest):
        pass
    return True


def _decode_data(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise InvalidRequest("the data of a sealed message is no base64") from None


# Entries of token logs. The scripts of the record read an entry's position, and a rolling hash, in clear.

_EVENT = re.compile(
    rb'\{(?:"id":"(\d+)-0",)?"sealed":"(\w+)","tenant":"([\w.-]+)","data":"([A-Za-z0-9+/=]+)"\}', re.ASCII
)
SEALED_HASH = b"0"
"""Stands for the rolling hash in clear: that would tell the tokens to whoever tries all words."""


def seal_event(sealer: Sealer, position: int, plain: bytes) -> bytes:
    """Return the entry of a token."""
    data = base64.b64encode(sealer.encrypt_content(plain, b"%d" % position))
    words = position, SEALED_HASH, sealer.key_id.encode(), sealer.tenant.encode(), data
    return b'{"id":"%d-%b","sealed":"%b","tenant":"%b","data":"%b"}' % words


def seal_end(sealer: Sealer, plain: bytes) -> bytes:
    """Return the entry of a log's end."""
    return sealer.encode_sealed(plain, {}, b"end")


def is_sealed_event(payload: object) -> bool:
    """Return whether an entry of a log is sealed. In any other these words could only be escaped, within a text."""
    return isinstance(payload, bytes) and b'"sealed":"' in payload[:40]  # a damaged reply may be anything


def open_event(request_id: str, payload: bytes) -> bytes:
    """Return the JSON of a sealed entry of a request's log. Raises as `open_data`."""
    found = _EVENT.fullmatch(payload)
    if found is None:
        raise InvalidRequest("a sealed entry without one of sealed, tenant and data")
    position, key_id, tenant, data = found.groups()
    sealed, bound = _decode_data(data.decode()), position or b"end"
    return open_data("event", tenant.decode(), request_id, key_id.decode(), sealed, bound)


# Names and secrets that follow from content.


def derive_secret(what: str, tenant: str) -> str:
    """Return a secret of a tenant with a key, else an empty text. It stays the same while its oldest key is there.

    Raises `ContentErased` and `TenantKeyMissing`.
    """
    keys = _find_keys(tenant)
    return "" if keys is None else _derive_key(next(iter(keys.by_id.values())), what, tenant, "").hex()


def mask_digest(tenant: str, digest: str) -> str:
    """Return a digest of content as it may stand in clear: for a tenant with a key nobody else can compute it."""
    secret = "" if _keyring is None else derive_secret("digest", tenant)
    return hmac.digest(bytes.fromhex(secret), digest.encode(), "sha256").hex() if secret else digest


# Objects and blocks: bytes, with a header in front.

_BYTES_START = b"PKSEAL1\n"
BYTES_OVERHEAD = len(_BYTES_START) + KEY_ID_CHARS + NONCE_BYTES + TAG_BYTES


def seal_bytes(kind: str, tenant: str, name: str, plain: bytes | memoryview, bound: bytes = b"") -> bytes | memoryview:
    """Return bytes sealed; as they are for a tenant without a key. Raises `ContentErased` and `TenantKeyMissing`."""
    sealer = None if _keyring is None else find_sealer(kind, tenant, name)
    return plain if sealer is None else _BYTES_START + sealer.key_id.encode() + sealer.encrypt_content(plain, bound)


def open_bytes(kind: str, tenant: str, name: str, stored: bytes | memoryview, bound: bytes = b"") -> bytes:
    """Return the bytes that `seal_bytes` was given, or what is no sealed bytes. Raises as `open_data`."""
    at = len(_BYTES_START)
    if stored[:at] != _BYTES_START:
        return bytes(stored)
    key_id = bytes(stored[at : at + KEY_ID_CHARS]).decode(errors="replace")
    return open_data(kind, tenant, name, key_id, stored[at + KEY_ID_CHARS :], bound)


# Files: their length is known at their end, and they are read in chunks.

_FILE_START = b"PKSEALF\n"
_SALT_CHARS = 32
_FILE_HEAD_BYTES = len(_FILE_START) + KEY_ID_CHARS + _SALT_CHARS


async def seal_file(tenant: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield a file sealed; as it is for a tenant without a key. Raises `ContentErased` and `TenantKeyMissing`.

    A head with the key's id and a random name is followed by a frame for each chunk: its length (4 bytes, big-endian),
    and what `Sealer.encrypt` returns, bound to its number. An empty frame, bound to `end` and its number, is the last.
    """
    salt = os.urandom(_SALT_CHARS // 2).hex()
    sealer = None if _keyring is None else find_sealer("file", tenant, salt)
    if sealer is None:
        async for chunk in chunks:
            yield chunk
        return
    yield _FILE_START + sealer.key_id.encode() + salt.encode()
    number = 0
    async for chunk in chunks:
        if chunk:
            yield _frame(sealer.encrypt_content(chunk, b"%d" % number))
            number += 1
    yield _frame(sealer.encrypt_content(b"", b"end%d" % number))


def _frame(sealed: bytes) -> bytes:
    return len(sealed).to_bytes(4, "big") + sealed


async def open_file(tenant: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what `seal_file` was given, or a file that is not sealed. Raises as `open_data`, also if it was cut."""
    waiting, head, number, is_whole = bytearray(), "", 0, False
    async for chunk in chunks:
        waiting += chunk
        if not head:
            if not _FILE_START.startswith(bytes(waiting[: len(_FILE_START)])):
                head = "clear"
            elif len(waiting) >= _FILE_HEAD_BYTES:
                head = waiting[len(_FILE_START) : _FILE_HEAD_BYTES].decode(errors="replace")
                del waiting[:_FILE_HEAD_BYTES]
            else:
                continue
        if head == "clear":
            yield bytes(waiting)
            waiting.clear()
            continue
        key_id, salt = head[:KEY_ID_CHARS], head[KEY_ID_CHARS:]
        while len(waiting) >= 4 and len(waiting) >= (end := 4 + int.from_bytes(waiting[:4], "big")):
            frame = bytes(waiting[4:end])
            is_whole = len(frame) == NONCE_BYTES + TAG_BYTES
            bound = b"end%d" % number if is_whole else b"%d" % number
            if plain := open_data("file", tenant, salt, key_id, frame, bound):
                yield plain
            number += 1
            del waiting[:end]
    if head in ("", "clear"):
        yield bytes(waiting)
    elif waiting or not is_whole:
        raise InvalidRequest("a sealed file ends too early")
