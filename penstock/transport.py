"""How servers are reached safely: what the settings of TLS and users mean for clients; urls without their passwords."""

import os
import re
from typing import TYPE_CHECKING, Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from redis.connection import parse_url

from penstock.sentinel import FORM as SENTINEL_FORM
from penstock.sentinel import is_sentinel, parse_sentinels

if TYPE_CHECKING:
    from penstock.settings import Addresses

KafkaSecurity = Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"]
KafkaMechanism = Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"]

_REDIS_FILES = {"ssl_ca_certs": "redis_ca_file", "ssl_certfile": "redis_cert_file", "ssl_keyfile": "redis_key_file"}
"""redis-py's names in a url, and ours."""
_WITH_TLS = ("rediss", "rediss+sentinel")
_ADDRESS_ENDS = re.compile(r",(?=\s*[a-z+]+://)")
_SECURITY = "PENSTOCK_KAFKA_SECURITY"
_FILES = tuple(f"{server}_{kind}_file" for server in ("kafka", "redis") for kind in ("ca", "cert", "key"))


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


def kafka_access(addresses: "Addresses") -> dict[str, str]:
    """What every Kafka client is given, besides where the brokers are."""
    if addresses.kafka_security == "plaintext":
        return {}
    given = {
        "ssl.ca.location": addresses.kafka_ca_file,
        "ssl.certificate.location": addresses.kafka_cert_file,
        "ssl.key.location": addresses.kafka_key_file,
    }
    if addresses.kafka_security.startswith("sasl"):
        given |= {
            "sasl.mechanism": addresses.kafka_mechanism,
            "sasl.username": addresses.kafka_user,
            "sasl.password": addresses.kafka_password.get_secret_value(),
        }
    return {"security.protocol": addresses.kafka_security} | {name: value for name, value in given.items() if value}


def with_files(url: str, addresses: "Addresses") -> str:
    """A Redis url with the certificates and the key that the settings name; what it says itself goes before them."""
    parts = urlsplit(url)
    if parts.scheme not in _WITH_TLS:
        return url
    query = dict(parse_qsl(parts.query))
    ours = {name: getattr(addresses, setting) for name, setting in _REDIS_FILES.items()}
    query = {name: value for name, value in ours.items() if value} | query
    return parts._replace(query=urlencode(query, quote_via=quote, safe="/")).geturl()


def contradictions(addresses: "Addresses") -> list[str]:
    """What does not go together; each names its variables."""
    return [*_kafka(addresses), *_redis(addresses), *_pairs(addresses)]


def _kafka(addresses: "Addresses") -> list[str]:
    security, wrong = addresses.kafka_security, []
    has_user, has_password = bool(addresses.kafka_user), bool(addresses.kafka_password.get_secret_value())
    if security.startswith("sasl") and not (has_user and has_password):
        wrong.append(f"{_SECURITY}={security} needs PENSTOCK_KAFKA_USER and PENSTOCK_KAFKA_PASSWORD")
    if not security.startswith("sasl") and (has_user or has_password):
        wrong.append(f"PENSTOCK_KAFKA_USER and PENSTOCK_KAFKA_PASSWORD need sasl_ssl, not {security}, in {_SECURITY}")
    if security != "plaintext" and not addresses.kafka:
        wrong.append(f"{_SECURITY}={security} needs brokers in PENSTOCK_KAFKA")
    if not security.endswith("ssl"):
        given = [name for name in _FILES if name.startswith("kafka") and getattr(addresses, name)]
        wrong += [f"PENSTOCK_{name.upper()} needs ssl or sasl_ssl, not {security}, in {_SECURITY}" for name in given]
    return wrong


def _redis(addresses: "Addresses") -> list[str]:
    wrong = []
    if not any(url.partition("://")[0] in _WITH_TLS for url in urls_of(f"{addresses.stream_url},{addresses.kv_url}")):
        given = [name for name in _REDIS_FILES.values() if getattr(addresses, name)]
        wrong += [f"PENSTOCK_{name.upper()} needs a rediss:// url in PENSTOCK_STREAM_URL" for name in given]
    return wrong


def _pairs(addresses: "Addresses") -> list[str]:
    wrong = []
    for server in ("KAFKA", "REDIS"):
        cert, key = (getattr(addresses, f"{server.lower()}_{kind}_file") for kind in ("cert", "key"))
        if bool(cert) != bool(key):
            wrong.append(f"PENSTOCK_{server}_CERT_FILE and PENSTOCK_{server}_KEY_FILE are given together")
    return wrong


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


def check_file(path: str) -> str:
    """The path, if it is empty, or one of a file that can be read. Raises `ValueError`."""
    if path and not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise ValueError("it is not a file that can be read")
    return path
