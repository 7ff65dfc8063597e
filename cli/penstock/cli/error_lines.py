"""Errors as one line that says what to do."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import redis

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, load_settings
from penstock.errors import AccessRefused, BusUnavailable, PenstockError, RequestError, SettingsError
from penstock.ops.access import check_access
from penstock.own_servers import format_place
from penstock.redis.client import REDIS_TIMEOUT_S, is_away, redis_client
from penstock.redis.sentinel import split_address
from penstock.redis.urls import hide_password, split_urls

START_KAFKA = "does not answer: start it, or set PENSTOCK_KAFKA to where it is"


def explain_error(error: BaseException, addresses: Addresses | None = None) -> str | None:
    """Return one line for an error of Penstock or Redis, None for any other.

    Where a server is the cause, the servers at these addresses (else those of the settings) are asked for the reason:
    clients' errors say little.
    """
    if not isinstance(error, redis.RedisError | PenstockError):
        return None
    if isinstance(error, redis.RedisError | BusUnavailable):
        try:
            addresses = addresses or load_settings(Addresses)
            check_access(addresses, "client")
        except (SettingsError, AccessRefused) as refused:
            return str(refused)
        if silent := describe_silent_server(addresses):
            return silent
    prefix = "Redis: " if isinstance(error, redis.RedisError) else ""
    return f"{error.code}: {error}" if isinstance(error, RequestError) else f"{prefix}{error}"


@contextmanager
def explain_server_errors(addresses: Addresses) -> Iterator[None]:
    """Explain errors of servers at these addresses, where options gave other ones than the settings have."""
    try:
        yield
    except (redis.RedisError, BusUnavailable) as error:
        raise PenstockError(explain_error(error, addresses)) from error


def describe_silent_server(addresses: Addresses) -> str:
    """Return which server does not answer now and what to do about it; empty if all of them answer."""
    for url in split_urls(addresses.stream_url):
        if is_redis_silent(url):
            advice = "start one with `penstock up`, or set PENSTOCK_STREAM_URL"
            return f"Redis at {format_address(url)} does not answer: {advice}"
    return f"Kafka at {addresses.kafka} {START_KAFKA}" if is_kafka_silent(addresses) else ""


def is_redis_silent(url: str) -> bool:
    """Return whether a server does not answer now."""
    try:
        with closing(redis_client(url)) as client:
            client.ping()
    except redis.RedisError as error:
        return is_away(error)
    return False


def is_kafka_silent(addresses: Addresses) -> bool:
    """Return whether there is a Kafka that does not answer now."""
    if addresses.kafka:
        try:
            connect_bus(addresses, load_settings(BusSettings)).check_connection(REDIS_TIMEOUT_S)
        except BusUnavailable:
            return True
    return False


def format_address(url: str) -> str:
    """Return host and port of an address, or the whole address without its password if it has neither."""
    parts = split_address(url)
    if parts.scheme in ("redis", "rediss") and parts.hostname:
        return format_place(parts.hostname, parts.port or 6379)
    return hide_password(url)
