"""Checks whether the servers let this process in. It is done once, before work begins; errors name the setting to look
at.

A server that is away is not checked: workers wait for it. A server that refuses later, while the worker runs, may be in
the middle of a change of its passwords: that is an outage like any other.
"""

import contextlib
import re
import ssl
from collections.abc import Iterator
from typing import Any

import redis

from penstock.config.addresses import Addresses
from penstock.errors import AccessRefused
from penstock.names import (
    CLASSES,
    GATEWAY_SECRET_KEY,
    KEYS_KEY,
    KV_INDEX,
    MODELS_KEY,
    TENANTS_KEY,
    WEBHOOKS_KEY,
    WORKERS_KEY,
    Pipeline,
    Role,
    batch_lease_key,
    kv_key,
    picture_key,
    rate_key,
    stream_meta_key,
    webhook_events_key,
)
from penstock.ops.tls import speaks_tls
from penstock.redis.client import redis_client
from penstock.redis.logins import LoginUnavailable, find_login
from penstock.redis.sentinel import find_masters, is_sentinel, parse_sentinels, split_address
from penstock.redis.urls import hide_password, split_urls

Command = tuple[str, ...]


def check_access(addresses: Addresses, role: Role | None = None, *, kv: bool = False) -> None:
    """Raise `AccessRefused` where a server does not let us in, or refuses commands that the `role` needs.

    `kv`: check the servers of the KV store, too. Servers that are away raise nothing; Kafka is waited for, for three
    seconds.
    """
    pipeline = Pipeline(addresses.pipeline)
    needed = list_commands(pipeline, role, streams=not addresses.kafka) if role else []
    for url in split_urls(addresses.stream_url):
        _check_redis(url, "PENSTOCK_STREAM_URL", needed)
    if kv:
        variable = "PENSTOCK_KV_URL" if addresses.kv_url else "PENSTOCK_STREAM_URL"
        for url in split_urls(addresses.kv_url or addresses.stream_url):
            _check_redis(url, variable, list_kv_commands() if role else [])
    if addresses.kafka:
        from penstock.ops.kafka_access import check_kafka  # confluent_kafka is loaded only where it is used

        check_kafka(addresses, pipeline, role)


def check_redis_access(addresses: Addresses, role: Role) -> None:
    """Raise `AccessRefused` where the first stream server refuses a command that the `role` needs."""
    needed = list_commands(Pipeline(addresses.pipeline), role, streams=not addresses.kafka)
    _check_redis(addresses.first_url, "PENSTOCK_STREAM_URL", needed)


def list_commands(pipeline: Pipeline, role: Role, *, streams: bool) -> list[Command]:
    """Return one example of each kind of command that a role sends to Redis."""
    record, channel = pipeline.record_key("x"), pipeline.live_channel("x")
    found: list[Command] = [("INFO", "server"), ("SMEMBERS", WORKERS_KEY), ("EVALSHA", "0" * 40, "1", record)]
    if role in ("client", "gateway"):
        found += [("SUBSCRIBE", channel), ("UNSUBSCRIBE", channel), *_list_client_commands(pipeline)]
    else:
        found += [("PUBLISH", channel, ""), ("SADD", WORKERS_KEY, "x"), ("SET", pipeline.worker_key(role, "x"), "x")]
        found += [("HSET", record, "x", "x"), ("XADD", pipeline.log_key("x"), "*", "e", "")]
    if role != "client":
        found += [("TIME",), ("SET", picture_key("x"), "x")]
    if role == "gateway":
        own = (
            rate_key("x"), stream_meta_key("x"), batch_lease_key("x"), pipeline.meter_key("x"),
            pipeline.shares_key("x"), GATEWAY_SECRET_KEY, pipeline.responses_key, MODELS_KEY, WEBHOOKS_KEY,
            webhook_events_key("x"),
        )  # fmt: skip
        found += [("HGET", KEYS_KEY, "x"), ("HGET", TENANTS_KEY, "x"), *(("SET", key, "x") for key in own)]
    if streams:
        keys = [pipeline.stream_key(pipeline.request_topic(priority_class)) for priority_class in CLASSES]
        found += [("XADD", key, "*", "x", "x") for key in keys]
        found += [("XLEN", keys[0]), ("XREAD", "STREAMS", pipeline.stream_key(pipeline.results_topic), "0")]
        if role != "client":
            found.append(("HGET", pipeline.meter_key("places"), "all"))
    return found


def _list_client_commands(pipeline: Pipeline) -> list[Command]:
    """Return commands for reading a stream, cancelling, and asking for the lag."""
    record, news = pipeline.record_key("x"), pipeline.news_key("x")
    cancelling = [
        ("HGET", record, "x"), ("HSET", record, "x", "x"), ("PEXPIRE", record, "1"), ("PTTL", record),
        ("RPUSH", news, "x"), ("PEXPIRE", news, "1"),
    ]  # fmt: skip
    return [
        ("XRANGE", pipeline.log_key("x"), "-", "+"),
        ("EXISTS", record),
        ("HMGET", record, "x"),
        ("EVAL", "return 0", "1", record),
        *cancelling,
        ("MGET", pipeline.worker_key("prefill", "x")),
    ]


def list_kv_commands() -> list[Command]:
    """Return one example of each kind of command that the KV store sends to Redis."""
    block = kv_key(b"x")
    return [("SET", block, "x"), ("STRLEN", block), ("SCRIPT", "LOAD", "return 0"), ("ZADD", KV_INDEX[0], "0", "x")]


def _check_redis(url: str, variable: str, commands: list[Command]) -> None:
    if is_sentinel(url):
        master = _find_master(url, variable)
        if master is None:
            return
        url = master
    try:
        with contextlib.closing(redis_client(url)) as client:
            for command, error in _find_denied(client, [("PING",), *commands]):
                user = split_address(url).username or "default"
                raise AccessRefused(
                    f"Redis at {hide_password(url)}: the user {user} may not {' '.join(command[:2])} ({error}); "
                    "the rights it needs are in docs/operations.md"
                )
    except (redis.RedisError, OSError, ValueError) as error:
        reason = explain_refusal(error, url, variable)
        if reason:
            raise AccessRefused(f"Redis at {hide_password(url)}: {reason}") from None


def _find_master(url: str, variable: str) -> str | None:
    """Return the address of the master that Sentinels name; None where none of them answers."""
    address = parse_sentinels(url)
    found = find_masters(url)
    answers = [answer for answer in found.values() if not isinstance(answer, redis.RedisError)]
    for place in answers:
        if place is not None:
            return address.server_url(place)
    if answers:
        raise AccessRefused(f"the Sentinels at {address} know no service {address.service!r}: see {variable}")
    for sentinel, error in found.items():
        if isinstance(error, redis.RedisError) and (
            reason := explain_refusal(error, address.sentinel_url(sentinel), variable)
        ):
            raise AccessRefused(f"the Sentinel at {address.sentinel_url(sentinel)}: {reason}")
    return None


def _find_denied(client: "redis.Redis", commands: list[Command]) -> Iterator[tuple[Command, str]]:
    """Yield the commands that the user may not send. They are queued in a transaction, which is then discarded."""
    connection: Any = client.connection_pool.get_connection()
    try:
        for together in ([("MULTI",)], [*commands, ("DISCARD",)]):  # MULTI first: without it, the others would run
            connection.send_packed_command(connection.pack_commands(together))
            for command in together:
                try:
                    connection.read_response()
                except redis.exceptions.NoPermissionError as error:
                    yield command, str(error)
                except redis.ResponseError:
                    continue  # an error that is not about rights
    finally:
        connection.disconnect()
        client.connection_pool.release(connection)


def explain_refusal(error: BaseException, url: str, variable: str) -> str:
    """Return the reason for which Redis refuses this client, if an error means that; else an empty string."""
    untrusted = _find_cause(error, ssl.SSLCertVerificationError)
    if isinstance(untrusted, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({untrusted.verify_message.rstrip('.')}): see PENSTOCK_REDIS_CA_FILE"
    if isinstance(error, LoginUnavailable):
        return f"{error}: see {variable}"
    if isinstance(error, redis.AuthenticationError) and (login := find_login(url)):
        return f"it refuses the password of {login}, which may have expired or be another user's: see {variable}"
    if isinstance(error, redis.AuthenticationError) or str(error).startswith("NOAUTH"):
        return f"wrong user or password: see {variable}"
    if (unread := _find_cause(error, redis.InvalidResponse)) is not None:
        spoken = "HTTP" if re.search('got "[H<]"', str(unread)) else "another protocol"
        return f"it is no Redis, as it speaks {spoken}: see {variable} (`penstock up` has its Redis on port 7379)"
    return _explain_cut(error, url, variable)


def _explain_cut(error: BaseException, url: str, variable: str) -> str:
    """Return whether a server cut the connection off because one side speaks TLS, or wants a certificate."""
    parts = split_address(url)
    is_cut = (
        _find_cause(error, ssl.SSLError) or _find_cause(error, ConnectionResetError) or "closed by server" in str(error)
    )
    if not is_cut or parts.scheme not in ("redis", "rediss"):
        return ""
    is_tls = speaks_tls(parts.hostname or "", parts.port or 6379)
    if parts.scheme == "redis":
        return f"it speaks TLS, and the url does not: rediss:// in {variable}" if is_tls else ""
    if is_tls:  # the server's certificate is trusted, so it refused a client without a certificate
        return "it wants a certificate of the client's: see PENSTOCK_REDIS_CERT_FILE and PENSTOCK_REDIS_KEY_FILE"
    return f"it does not speak TLS: redis:// in {variable}?" if _find_cause(error, ssl.SSLError) else ""


def _find_cause(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    """Return the error, or the first of its causes, that is of this kind; else None."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error
