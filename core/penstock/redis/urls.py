"""Addresses of Redis servers: several in one setting, the names of servers, and urls without passwords."""

import re

from redis.connection import parse_url

from penstock.own_servers import format_place
from penstock.redis.logins import InvalidLogin, split_login
from penstock.redis.sentinel import SENTINEL_URL_FORM, is_sentinel, parse_sentinels, split_address

_ADDRESS_ENDS = re.compile(r",(?=\s*[a-z+]+://)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def hide_password(url: str) -> str:
    """Return a url without its password, so that it may be printed. The url may be malformed."""
    # First, as such a password may hold the separators that the rest looks for.
    url = re.sub(r"(password=)[^&#]*", r"\1***", url, flags=re.IGNORECASE)
    scheme = found[0] if (found := re.match(r"[a-z0-9+]+://", url)) else ""
    user, at, rest = url.removeprefix(scheme).rpartition("@")
    name, colon, _ = user.partition(":")
    login = f"{name}:***@" if colon else "***@" if at else ""
    hosts = []  # Sentinels' addresses have several
    while is_sentinel(url) and (host := re.match(r"(?:\[[^\]]*\]|[^:/?#,]*)(?::\d+)?,", rest)):
        hosts.append(host[0])
        rest = rest.removeprefix(host[0])
    rest = re.sub(r"^(\[[^\]]*\]|(?!\[[^\]]*\])[^:/?#]*):(?!\d*(?:[/?#]|$)).*", r"\1:***", rest, flags=re.DOTALL)
    return f"{scheme}{login}{''.join(hosts)}{rest}"


def hide_passwords(text: str) -> str:
    """Return several urls with commas between them without their passwords, which may hold commas against the rules."""
    return ",".join(hide_password(url) for url in _ADDRESS_ENDS.split(text))


def split_urls(text: str) -> list[str]:
    """Return the addresses in a setting, where they stand with commas between them. A Sentinel address holds commas
    too.
    """
    found = (url.strip() for url in _ADDRESS_ENDS.split(text))
    return [one for url in found for one in ([url] if is_sentinel(url) else map(str.strip, url.split(","))) if one]


def check_urls(text: str) -> str:
    """Return the setting as it is if all addresses in it have a valid form. Raise `ValueError`, without passwords."""
    for url in split_urls(text):
        try:
            if is_sentinel(url):
                parse_sentinels(url)
            else:
                parse_url(url)  # type: ignore[no-untyped-call]
            split_login(url)
        except InvalidLogin as error:
            raise ValueError(f"{hide_password(url)}: {error}") from None
        except (ValueError, TypeError):
            if is_sentinel(url):
                raise ValueError(
                    f"{hide_password(url)} is no valid address of Sentinels: write {SENTINEL_URL_FORM}, "
                    "with special characters of a password percent-encoded"
                ) from None
            raise ValueError(
                f"{hide_password(url)} is no valid Redis url: write redis://, rediss:// (with TLS), unix:// or "
                "redis+sentinel://, "
                "with special characters of a password percent-encoded"
            ) from None
    return text


def server_name(url: str) -> str:
    """Return the name of a server, by which requests are assigned to servers: the part behind the `#`, or its location.

    The location is `host:port/db` without user and password, `service/db` behind Sentinels, and `path/db` for a socket.
    Raise `ValueError` for a name of the wrong form.
    """
    fragment = split_address(url).fragment
    if fragment and _NAME.fullmatch(fragment) is None:
        # The message leaves the fragment out: it may be a part of a password.
        raise ValueError(
            "the text after # in an address names the server: letters, digits and . _ : / -, at most 128; "
            "a # in a password is written %23"
        )
    if fragment:
        return fragment
    if is_sentinel(url):
        address = parse_sentinels(url)
        return f"{address.service}/{address.db}"
    parts = parse_url(url)  # type: ignore[no-untyped-call]
    host = parts.get("host", "localhost")
    place = parts.get("path") or format_place(host, parts.get("port", 6379))
    return f"{place}/{parts.get('db', 0)}"


def check_names(text: str) -> str:
    """Return the setting as it is if no two servers have the same name. Raise `ValueError`."""
    names = [server_name(url) for url in split_urls(text)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two servers have the name {twice[0]}: give each its own name, redis://…#name")
    return text
