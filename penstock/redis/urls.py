"""Addresses of Redis servers: several in one setting, the names of servers, and urls as they may be printed."""

import re
from urllib.parse import urlsplit

from redis.connection import parse_url

from penstock.redis.sentinel import FORM as SENTINEL_FORM
from penstock.redis.sentinel import is_sentinel, parse_sentinels

_ADDRESS_ENDS = re.compile(r",(?=\s*[a-z+]+://)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def shown(url: str) -> str:
    """A url as it may be printed: without its password, also where it is not as urls should be."""
    url = re.sub(r"(password=)[^&#]*", r"\1***", url, flags=re.IGNORECASE)  # it may hold what the rest looks for
    scheme = found[0] if (found := re.match(r"[a-z0-9+]+://", url)) else ""
    user, at, rest = url.removeprefix(scheme).rpartition("@")
    name, colon, _ = user.partition(":")
    login = f"{name}:***@" if colon else "***@" if at else ""
    hosts = []  # Sentinels' addresses have several
    while is_sentinel(url) and (host := re.match(r"(?:\[[^\]]*\]|[^:/?#,]*)(?::\d+)?,", rest)):
        hosts.append(host[0])
        rest = rest.removeprefix(host[0])
    rest = re.sub(r"^(\[[^\]]*\]|[^:/?#]*):(?!\d*(?:[/?#]|$)).*", r"\1:***", rest, flags=re.DOTALL)
    return f"{scheme}{login}{''.join(hosts)}{rest}"


def all_shown(text: str) -> str:
    """Several urls with commas between, as they may be printed. A password may hold a comma, against the rules."""
    return ",".join(shown(url) for url in _ADDRESS_ENDS.split(text))


def urls_of(text: str) -> list[str]:
    """The addresses of a setting that may hold several, with commas between; those of Sentinels hold commas too."""
    found = (url.strip() for url in _ADDRESS_ENDS.split(text))
    return [one for url in found for one in ([url] if is_sentinel(url) else map(str.strip, url.split(","))) if one]


def check_urls(text: str) -> str:
    """The text, if Redis is at all the urls in it. Raises `ValueError`, which does not hold their passwords."""
    for url in urls_of(text):
        try:
            if is_sentinel(url):
                parse_sentinels(url)
            else:
                parse_url(url)  # type: ignore[no-untyped-call]
        except (ValueError, TypeError):
            if is_sentinel(url):
                raise ValueError(
                    f"{shown(url)} is no address of Sentinels: {SENTINEL_FORM}, "
                    "with special characters of a password percent-encoded"
                ) from None
            raise ValueError(
                f"{shown(url)} is no Redis url: redis://, rediss:// (with TLS), unix:// or redis+sentinel://, "
                "with special characters of a password percent-encoded"
            ) from None
    return text


def name_of(url: str) -> str:
    """A server's name, by which requests are dealt out: what stands behind the `#`, or else where the server is.

    That is `host:port/db` without user and password; of Sentinels' addresses `service/db`, of sockets `path/db`. Raises
    `ValueError` for a name of the wrong form.
    """
    fragment = urlsplit(url).fragment
    if fragment and _NAME.fullmatch(fragment) is None:
        # It is not shown: it may be a part of a password.
        raise ValueError(
            "what stands behind the # of an address names a server: letters, digits and . _ : / -, at most 128; "
            "a # in a password is written %23"
        )
    if fragment:
        return fragment
    if is_sentinel(url):
        address = parse_sentinels(url)
        return f"{address.service}/{address.db}"
    parts = parse_url(url)  # type: ignore[no-untyped-call]
    host = parts.get("host", "localhost")
    place = parts.get("path") or f"{f'[{host}]' if ':' in host else host}:{parts.get('port', 6379)}"
    return f"{place}/{parts.get('db', 0)}"


def check_names(text: str) -> str:
    """Return the addresses as they are, if each server has a name of its own. Raises `ValueError`."""
    names = [name_of(url) for url in urls_of(text)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two servers have the name {twice[0]}: give each one of its own, redis://…#name")
    return text
