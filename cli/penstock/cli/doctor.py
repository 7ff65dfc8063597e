"""`penstock doctor`: check that everything a pipeline needs is here, and say what to do about what is missing."""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import redis
import typer
from rich.console import Console
from rich.markup import escape

from penstock.bus.connect import connect_bus
from penstock.bus.contract import Bus
from penstock.bus.lost import describe_lost, read_lost
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, EngineSettings, RegionSettings, WebhookSettings, load_settings
from penstock.engine.diagnosis import check_engine
from penstock.errors import (
    BusUnavailable,
    DependencyMissing,
    PenstockError,
    ServersDiffer,
    SettingsError,
    StateMismatch,
)
from penstock.findings import Finding, State
from penstock.local.valkey import find_binary
from penstock.messages import now_s
from penstock.names import STAGES, WHOLE_KINDS, Pipeline, find_stages
from penstock.ops.access import explain_refusal
from penstock.ops.copies import check_kafka_copies, check_redis_copies, read_kafka_copies
from penstock.ops.eviction import CLUSTER_REASON, find_policy, is_in_cluster_mode
from penstock.ops.status import read_worker_status
from penstock.record import check_server_key_types
from penstock.record.session import MAX_CLOCK_ERROR_S
from penstock.redis.client import redis_client
from penstock.redis.sentinel import find_masters, is_sentinel, parse_sentinels
from penstock.redis.servers import check_server_list
from penstock.redis.urls import hide_password, server_name, split_urls

if TYPE_CHECKING:
    from penstock.bus.kafka.bus import KafkaBus

CHECK_LIMIT_S = 20.0
"""How long the checks of one kind of server may take in all."""
STATE_STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "fail": "red"}


def doctor() -> None:
    """Check dependencies, addresses, topics, workers and the model. Exit code 1 when something fails."""
    console = Console(highlight=False, soft_wrap=True)
    failed = False
    for finding in run_checks():
        failed |= finding.state == "fail"
        state = f"[{STATE_STYLES[finding.state]}]{finding.state:4}[/]"
        console.print(f"{state}  {finding.subject:19} {escape(finding.detail)}")
        if finding.advice:
            console.print(f"      {'':19} → {escape(finding.advice)}")
    raise typer.Exit(1 if failed else 0)


def run_checks() -> Iterator[Finding]:
    """Yield the findings of every check: what servers answer, then what is installed, last what needs torch."""
    addresses = load_settings(Addresses)
    local: list[Callable[[], Iterator[Finding]]] = [
        _check_python,
        _check_packages,
        _check_server_programs,
        _check_native_copying,
        lambda: check_engine(load_settings(EngineSettings)),
    ]
    remote: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("stream Redis", lambda: _check_stream_redis(addresses)),
        ("KV Redis", lambda: _check_kv_redis(addresses)),
        ("bus", lambda: _check_bus(addresses)),
        ("workers", lambda: _check_workers(addresses)),
        ("copied regions", lambda: _check_copied_regions(addresses)),
        ("webhook", _check_webhooks),
    ]
    for findings in [_run_within_limit(subject, check) for subject, check in remote]:
        yield from findings
    for check in local:
        yield from check()


def _run_within_limit(subject: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Begin a check that asks servers. Return its findings, as they come, and one more where it takes too long.

    Each of its calls has a time limit and is tried again, which adds up where a server is full or stands still. The
    thread of such a check is left to itself, and ends with the process.
    """
    found: queue.SimpleQueue[Finding | BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            for finding in check():
                found.put(finding)
            found.put(None)
        except BaseException as error:
            found.put(error)

    threading.Thread(target=run, name=f"doctor-{subject}", daemon=True).start()
    return _read_within_limit(subject, found, time.monotonic() + CHECK_LIMIT_S)


def _read_within_limit(
    subject: str, found: "queue.SimpleQueue[Finding | BaseException | None]", end_s: float
) -> Iterator[Finding]:
    while True:
        try:
            finding = found.get(timeout=max(0.0, end_s - time.monotonic()))
        except queue.Empty:
            advice = "the server is full, stands still or is hard to reach: look there, then ask again"
            yield Finding("fail", subject, f"no answer within {CHECK_LIMIT_S:g} s", advice)
            return
        if finding is None:
            return
        if isinstance(finding, BaseException):
            raise finding
        yield finding


def _check_python() -> Iterator[Finding]:
    yield Finding("ok", "Python", platform.python_version())


def _check_packages() -> Iterator[Finding]:
    for name, extra in (
        ("confluent-kafka", ""),
        ("redis", ""),
        ("torch", "worker"),
        ("transformers", "worker"),
    ):
        try:
            yield Finding("ok", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            advice = f"pip install 'penstock[{extra}]'" if extra else "pip install penstock"
            yield Finding("note" if extra else "fail", name, "not installed", f"a worker needs it: {advice}")


def _check_native_copying() -> Iterator[Finding]:
    """Check that the KV store's native copying was built."""
    if importlib.util.find_spec("xxhash") is None:
        return
    from penstock.kvstore.native import library

    native = library.load_library()
    if native is not None:
        yield Finding("ok", "native copying", f"{native.isa}; KV blocks are copied and checked in one pass")
        return
    advice = "install a C++ compiler (Debian: apt-get install g++), then the project again"
    yield Finding("note", "native copying", "not built: KV blocks are copied and checked in two passes", advice)


def _check_server_programs() -> Iterator[Finding]:
    """Check for the program that the embedded stack is started from."""
    try:
        yield Finding("ok", "Valkey program", str(find_binary()))
    except DependencyMissing as missing:
        yield Finding("note", "Valkey program", "not found", str(missing))


def _check_sentinels(url: str) -> Iterator[Finding]:
    """Check that the Sentinels of an address answer, and name one master."""
    address, found = parse_sentinels(url), find_masters(url)
    masters = {master for master in found.values() if not isinstance(master, redis.RedisError)}
    silent = [sentinel for sentinel, master in found.items() if isinstance(master, redis.RedisError)]
    named = " and ".join("nothing" if master is None else f"{master[0]}:{master[1]}" for master in masters) or "nothing"
    what = f"{len(found) - len(silent)} of {len(found)} answer, and name {named} as the master of {address.service!r}"
    if len(masters) != 1 or None in masters:
        yield Finding("fail", "Sentinels", what, "they have to know the service, and agree: see PENSTOCK_STREAM_URL")
    elif silent:
        listed = ", ".join(address.sentinel_url(sentinel) for sentinel in silent)
        yield Finding("note", "Sentinels", what, f"start those that do not answer: {listed}")
    else:
        yield Finding("ok", "Sentinels", what)


def _check_redis(what: str, url: str, *, evicting_is_fine: bool) -> Iterator[Finding]:
    if is_sentinel(url):
        yield from _check_sentinels(url)
    try:
        with redis_client(url) as client:
            version = client.info("server")["redis_version"]
            policy, persistence = find_policy(client), client.info("persistence")
            has_cluster = is_in_cluster_mode(client)
    except (redis.RedisError, ValueError) as error:
        advice = "start one with `penstock up`, or set PENSTOCK_STREAM_URL / PENSTOCK_KV_URL"
        reason = explain_refusal(error, url, "PENSTOCK_STREAM_URL / PENSTOCK_KV_URL")
        yield Finding("fail", what, f"{hide_password(url)}: {reason or error}", "" if reason else advice)
        return
    if has_cluster:
        yield Finding("fail", what, f"{hide_password(url)} {CLUSTER_REASON}")
    if not evicting_is_fine and policy:
        yield Finding(
            "fail",
            what,
            f"{hide_password(url)}: evicts ({policy})",
            "logs must not be evicted: maxmemory-policy noeviction",
        )
    elif not evicting_is_fine and not persistence.get("aof_enabled"):
        yield Finding(
            "note",
            what,
            f"{hide_password(url)}: {version}, no append-only file",
            "a restart loses streams: appendonly yes",
        )
    else:
        yield Finding("ok", what, f"{hide_password(url)}: {version}")


def _check_stream_redis(addresses: Addresses) -> Iterator[Finding]:
    """Check each stream server, and that all have the same list of servers."""
    names, pipeline = [server_name(url) for url in split_urls(addresses.stream_url)], Pipeline(addresses.pipeline)
    for url, name in zip(split_urls(addresses.stream_url), names, strict=True):
        what = "stream Redis" if len(names) == 1 else f"stream Redis {name}"
        yield from _check_redis(what, url, evicting_is_fine=False)
        try:
            with redis_client(url) as client:
                yield _check_clock(client)
                yield from check_redis_copies(what, client.info("replication"), has_sentinels=is_sentinel(url))
                check_server_list(client, pipeline, names)
                check_server_key_types(client, pipeline.list_key_types(), name)
        except redis.RedisError:
            continue  # reported by `_check_redis`
        except ServersDiffer as error:
            yield Finding("fail", "stream servers", str(error), "set PENSTOCK_STREAM_URL alike everywhere")
        except StateMismatch as error:
            yield Finding("fail", "keys in Redis", str(error))


def _check_clock(client: "redis.Redis") -> Finding:
    """Compare this host's clock with a stream server's."""
    before_s = now_s()
    seconds, microseconds = client.time()
    ahead_s = (before_s + now_s()) / 2 - (seconds + microseconds / 1e6)
    found = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} that of Redis"
    if abs(ahead_s) > MAX_CLOCK_ERROR_S:
        return Finding("note", "clock", found, "set both hosts' clocks by NTP: a deadline is a time of day")
    return Finding("ok", "clock", found)


def _check_kv_redis(addresses: Addresses) -> Iterator[Finding]:
    for url in split_urls(addresses.kv_url or addresses.stream_url):
        yield from _check_redis("KV Redis", url, evicting_is_fine=True)


def _check_bus(addresses: Addresses) -> Iterator[Finding]:
    kind = "Kafka" if addresses.kafka else "bus (Redis Streams)"
    try:
        bus = connect_bus(addresses, load_settings(BusSettings))
        yield Finding("ok", kind, bus.check_connection())
        missing = bus.find_missing_topics()
    except (PenstockError, redis.RedisError) as error:
        where = addresses.kafka or hide_password(addresses.first_url)
        reason = "" if addresses.kafka else explain_refusal(error, addresses.first_url, "PENSTOCK_STREAM_URL")
        yield Finding(
            "fail", kind, f"{where}: {reason or error}", "start it, or set PENSTOCK_KAFKA / PENSTOCK_STREAM_URL"
        )
        return
    if missing:
        yield Finding("fail", "topics", f"{len(missing)} missing, first {missing[0]}", "penstock topics create")
    else:
        yield Finding("ok", "topics", "all there")
    if addresses.kafka:
        yield from _check_kafka(bus, are_all_there=not missing)
    with contextlib.suppress(redis.RedisError), redis_client(addresses.first_url) as client:
        for lost in describe_lost(read_lost(client, Pipeline(addresses.pipeline))):
            yield Finding("note", "lost messages", lost, "docs/operations.md#penstockmessageslost")


def _check_copied_regions(addresses: Addresses) -> Iterator[Finding]:
    """Check that the regions in `PENSTOCK_REGION_COPIES` are copied, by the newest heartbeat that was."""
    regions = load_settings(RegionSettings).list_copies()
    if not regions:
        return
    from penstock.ingest.regions.copies import STANDING_S, check_bus, read_copy_state

    try:
        check_bus(addresses)
        with redis_client(addresses.first_url) as client:
            states = {region: read_copy_state(client, Pipeline(addresses.pipeline), region) for region in regions}
    except SettingsError as error:
        yield Finding("fail", "copied regions", str(error), "take PENSTOCK_REGION_COPIES away, or use Kafka")
        return
    except redis.RedisError:
        return  # reported by `_check_redis`
    for region, state in states.items():
        age = "no heartbeat came" if state.age_s is None else f"the newest heartbeat is {state.age_s:.0f} s old"
        found = f"{region}: {state.num_open:,} open, {age}"
        if state.age_s is None or state.age_s > STANDING_S:
            advice = (
                "is MirrorMaker running, has its task failed (its log), do gateways run here, does the region live?"
            )
            yield Finding("fail", "copied regions", found, advice)
        else:
            yield Finding("ok", "copied regions", found)


def _check_kafka(bus: Bus, *, are_all_there: bool) -> Iterator[Finding]:
    """Check the topics' settings and copies, where all are there, and the transactions."""
    from penstock.bus.kafka.bus import KafkaBus

    assert isinstance(bus, KafkaBus)
    advice = "give this user the right to describe the settings of topics and of the cluster (DESCRIBE_CONFIGS)"
    if are_all_there:
        yield from _tell_unknown("note", "topic settings", advice, _check_topic_settings(bus))
        yield from _tell_unknown("note", "copies", advice, _check_copies(bus))
    yield from _tell_unknown("fail", "transactions", "ask again when the brokers answer", _check_transactions(bus))


def _tell_unknown(state: State, subject: str, advice: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings of a check, and one more where the brokers do not tell what it needs to know."""
    try:
        yield from findings
    except BusUnavailable as error:
        yield Finding(state, subject, f"not known: {error}", advice)


def _check_topic_settings(bus: "KafkaBus") -> Iterator[Finding]:
    """Check that the topics have the settings with which `penstock topics create` makes them, and keep work for long
    enough.
    """
    from penstock.bus.kafka.bus import alter_command, describe_own_topics, find_old_work, find_wrong_settings

    own, wrong_own = describe_own_topics(bus)
    found, old = find_wrong_settings(bus), find_old_work(bus)
    for topic, wrong in found.items():
        listed = ", ".join(f"{name} is {value}" for name, value in wrong.items())
        yield Finding("fail", "topic settings", f"{topic}: {listed}", alter_command(bus, topic, wrong))
    for topic in old:
        waits = f"{topic}: one waits for half of the time for which it is kept"
        yield Finding("fail", "oldest message", waits, "start workers, or raise retention.ms: else it is lost")
    for fault in wrong_own:
        advice = "penstock topics create --tenant NAME, or as many partitions as the shared topic: docs/regions.md"
        yield Finding("fail", "own topics", fault, advice)
    if own and not wrong_own:
        yield Finding("ok", "own topics", own)
    if not (found or old):
        yield Finding("ok", "topic settings", "as the pipeline needs them")


def _check_copies(bus: "KafkaBus") -> Iterator[Finding]:
    """Check that a broker, and a zone where there are several, may be lost."""
    told = read_kafka_copies(bus.clients, bus.pipeline.all_topics(), with_selectors=bool(bus.settings.rack))
    yield from check_kafka_copies(told, bus.settings.rack)


def _check_transactions(bus: "KafkaBus") -> Iterator[Finding]:
    """Check that no transaction holds up readers because it is open longer than a worker's may be."""
    from penstock.bus.kafka.admin_lookups import find_stuck_partitions

    topics = [*bus.pipeline.all_topics(), *bus.find_own_topics()]
    found = find_stuck_partitions(bus.clients, topics, bus.settings.transaction_timeout_s)
    for topic, partition, stable, end in found:
        where = f"{topic} partition {partition}: readers wait at offset {stable}, the log ends at {end}"
        advice = (
            "a transaction is open; the broker ends a dead member's within ten seconds or so. If it is still there "
            "in a minute: kafka-transactions.sh find-hanging, then abort (docs/operations.md)"
        )
        yield Finding("fail", "transactions", where, advice)
    if not found:
        yield Finding("ok", "transactions", "none holds up a partition")


def _check_workers(addresses: Addresses) -> Iterator[Finding]:
    try:
        workers = read_worker_status(addresses)
    except redis.RedisError:
        return
    kinds = {worker["stage"] for worker in workers} & set(WHOLE_KINDS)
    if load_settings(EngineSettings).kind == "openai":
        kinds.add("endpoint")
    served: set[str] = set()
    for kind in sorted({worker["stage"] for worker in workers}):
        states = [worker["state"] for worker in workers if worker["stage"] == kind]
        if "ready" in states:
            served.update((kind, *find_stages(kind)))
        found = f"{states.count('ready')} ready of {len(states)}"
        yield Finding("ok" if "ready" in states else "note", f"{kind} workers", found)
    lacking = [stage for stage in (sorted(kinds) or STAGES) if stage not in served]
    if lacking:
        kind = "auto" if len(lacking) > 1 else lacking[0]
        found = f"none is ready for {' and '.join(lacking)}"
        yield Finding("fail", "workers", found, f"penstock up, or penstock worker {kind}")
    for worker in workers:
        kind, name = f"{worker['stage']} worker", worker["name"]
        if worker["state"] == "degraded":
            yield Finding("note", kind, f"{name} is degraded: {worker['reason']}")
        if resident := worker.get("resident_bytes"):
            yield Finding("ok", kind, f"{name}: {resident / 2**20:,.0f} MiB of memory are resident")
    if len(found_ways := sorted({worker["arithmetic"] for worker in workers if worker.get("arithmetic")})) > 1:
        advice = "an answer's tokens depend on which of them goes on with it: let all compute in one way"
        yield Finding("note", "arithmetic", f"workers compute in {'; in '.join(found_ways)}", advice)


def _check_webhooks() -> Iterator[Finding]:
    """Check that gateways would send events to the URL that is set."""
    settings = load_settings(WebhookSettings)
    if not settings.url:
        return
    from penstock.ingest.webhooks import find_addresses

    try:
        addresses = asyncio.run(find_addresses(settings.url, settings.allowed_hosts))
    except ValueError as error:
        advice = "set PENSTOCK_WEBHOOK_URL to https:// and a public host, or name the host in PENSTOCK_WEBHOOK_HOSTS"
        yield Finding("fail", "webhook", f"events are not sent: {error}", advice)
    except OSError as error:
        yield Finding(
            "fail", "webhook", f"events are not sent: {error}", "does the host in PENSTOCK_WEBHOOK_URL exist?"
        )
    else:
        yield Finding("ok", "webhook", f"events go to {', '.join(addresses)}")
