"""Logins at Redis with passwords that change while a process runs: `login=…` in the query of an address.

    rediss://user@host:6379/0?login=file:/run/secrets/redis-token    a file, written anew by whoever rotates it
    rediss://user@host:6379/0?login=elasticache:CACHE                signed with AWS's credentials, see `penstock.aws`

The password is read whenever a connection is opened. Open connections keep their login until the server closes them, as
ElastiCache and Azure do when a token has ended; then they are opened again as after any other failure.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import redis
from redis.credentials import CredentialProvider

from penstock.aws import AwsSigner
from penstock.errors import AccessRefused
from penstock.redis.sentinel import split_address

LOGIN_FORMS = "login=file:/PATH or login=elasticache:CACHE"


class InvalidLogin(ValueError):
    """The login of an address has no valid form. The message has no part of the address."""


class LoginUnavailable(redis.AuthenticationError):
    """The password of a login cannot be had now; the message says why, and what to do."""


class ChangingLogin(CredentialProvider):
    """A user, whose password is read for each new connection."""

    def __init__(self, user: str, read_password: Callable[[], str]) -> None:
        self._user, self._read_password = user, read_password

    def get_credentials(self) -> tuple[str, str]:
        """Return user and password. Raise `LoginUnavailable`."""
        return self._user, self._read_password()

    async def get_credentials_async(self) -> tuple[str, str]:
        """Return user and password. Raise `LoginUnavailable`."""
        return await asyncio.to_thread(self.get_credentials)  # AWS's credentials may have to be asked for


def find_login(url: str) -> str:
    """Return the login in a url's query; empty where it has none."""
    return dict(parse_qsl(split_address(url).query)).get("login", "")


def split_login(url: str) -> tuple[str, dict[str, Any]]:
    """Return a url without user and `login`, and the option of its connections that has them instead.

    A url without `login` is returned as it is. Raise `InvalidLogin`, or `DependencyMissing` where AWS's is not there.
    """
    if not (given := find_login(url)):
        return url, {}
    parts = split_address(url)
    user, _, hosts = parts.netloc.rpartition("@")
    if ":" in user:
        raise InvalidLogin(f"it has a password and a login: write the user alone before the @ with {LOGIN_FORMS}")
    kept = [(name, value) for name, value in parse_qsl(parts.query) if name != "login"]
    query = f"?{urlencode(kept, quote_via=quote, safe='/')}" if kept else ""
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    name = unquote(user) or "default"
    login = ChangingLogin(name, _make_reader(given, name))
    return f"{parts.scheme}://{hosts}{parts.path}{query}{fragment}", {"credential_provider": login}


def _make_reader(login: str, user: str) -> Callable[[], str]:
    kind, _, name = login.partition(":")
    if kind == "file" and name.startswith("/"):
        return lambda: _read_file(Path(name))
    if kind == "elasticache" and name.isprintable() and not set(name) & set("/?#@ "):
        signer = AwsSigner("elasticache")
        return lambda: _sign_login(signer, name.lower(), user)
    raise InvalidLogin(f"its login has no valid form: write {LOGIN_FORMS}")


def _read_file(path: Path) -> str:
    try:
        password = path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise LoginUnavailable(f"the file of the login, {path}, cannot be read: {reason}") from None
    if not password:
        raise LoginUnavailable(f"the file of the login, {path}, is empty: whoever writes it has not done so yet")
    return password


def _sign_login(signer: AwsSigner, cache: str, user: str) -> str:
    try:
        url, _ = signer.sign_url(f"https://{cache}/?Action=connect&User={quote(user, safe='')}")
    except AccessRefused as error:
        raise LoginUnavailable(str(error)) from None
    return url.removeprefix("https://")
