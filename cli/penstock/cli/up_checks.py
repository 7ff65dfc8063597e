"""The checks of `penstock up` before it starts anything: it reports all problems at once."""

import errno
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import redis

from penstock.cli.error_lines import START_KAFKA, format_address, is_kafka_silent, is_redis_silent
from penstock.cli.generate import describe_bus_mismatch
from penstock.config.addresses import Addresses
from penstock.config.settings import EngineSettings, GatewaySettings, TelemetrySettings, load_settings
from penstock.engine.loading.vector_files import open_checkpoint
from penstock.engine.weights.files import check_model_here
from penstock.errors import AccessRefused, DependencyMissing, DirectoryTaken, ModelLoadError
from penstock.local.stack import Stack
from penstock.local.valkey import find_binary
from penstock.names import describe_kind, may_serve_together
from penstock.ops.access import check_access
from penstock.ops.status import read_worker_status
from penstock.own_servers import TAKEN_BY_CLIENT, describe_port_problem
from penstock.redis.urls import split_urls

MIN_FREE_MB = 16
"""Space for data and logs without which nothing is started: a server's first files, and the first day's logs."""


class WantedPort(NamedTuple):
    """A port that a process of the stack will listen on."""

    user: str
    host: str
    port: int
    option: str
    """The option or variable that gives it another port."""
    host_option: str = "host"
    """The same for another host."""


def find_obstacles(
    stack: Stack, redis_port: int | None, gateway_port: int | None, engine: EngineSettings | None = None
) -> list[str]:
    """Return a line for each thing for which the stack could not serve. A port is None if its server is not started.

    It takes milliseconds, and some seconds where a server does not answer. `engine` are the workers' settings.
    """
    engine = engine or load_settings(EngineSettings)
    return [
        *_find_directory_problems(stack, starts_redis=redis_port is not None),
        *_find_port_problems(list_ports(stack, redis_port, gateway_port)),
        *_find_model_problems(stack, engine),
        *_find_server_problems(stack.addresses, starts_redis=redis_port is not None),
        *find_worker_problems(stack, [] if redis_port is not None else list_running_workers(stack.addresses), engine),
    ]


def list_ports(stack: Stack, redis_port: int | None, gateway_port: int | None) -> list[WantedPort]:
    """Return the ports that the stack's processes will listen on."""
    ports, telemetry = [], load_settings(TelemetrySettings)
    if redis_port is not None:
        ports.append(WantedPort("Redis", "127.0.0.1", redis_port, "--port"))
    if gateway_port is not None:
        host = load_settings(GatewaySettings).host
        ports.append(WantedPort("the gateway", host, gateway_port, "--gateway-port", "PENSTOCK_GATEWAY_HOST"))
    if telemetry.telemetry == "on" and telemetry.telemetry_port:
        for number, worker in enumerate(stack.workers):
            user, port = f"the metrics of {worker.name}", telemetry.telemetry_port + number
            options = "PENSTOCK_TELEMETRY_PORT", "PENSTOCK_TELEMETRY_HOST"
            ports.append(WantedPort(user, telemetry.telemetry_host, port, *options))
    return ports


def _find_port_problems(ports: Sequence[WantedPort]) -> Iterator[str]:
    users: dict[int, WantedPort] = {}
    for wanted in ports:
        other = users.setdefault(wanted.port, wanted)
        if other is not wanted:
            yield (
                f"port {wanted.port} is for {other.user} and for {wanted.user}: choose another {other.option} or "
                f"{wanted.option}"
            )
        elif problem := describe_port_problem(wanted.host, wanted.port):
            advice = {
                "is taken": "is there a `penstock up` running already? Stop it, or ",
                TAKEN_BY_CLIENT: "free it, or ",
            }
            options = f"{wanted.host_option} or {wanted.option}" if problem not in advice else wanted.option
            yield f"port {wanted.port} for {wanted.user} {problem}: {advice.get(problem, '')}choose another {options}"


def _find_directory_problems(stack: Stack, *, starts_redis: bool) -> Iterator[str]:
    advice = "choose another --data"
    try:
        stack.directory.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(stack.directory, os.W_OK) else "it cannot be written to"
        if not reason:
            stack.lock_data()
            with tempfile.TemporaryFile(dir=stack.directory) as file:
                os.posix_fallocate(file.fileno(), 0, MIN_FREE_MB * 2**20)  # it takes the room, and writes nothing
    except DirectoryTaken as taken:
        yield str(taken)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason, advice = f"fewer than {MIN_FREE_MB} MB are free there", f"make room, or {advice}"
    if reason:
        yield f"{stack.directory}, for data and logs: {reason}: {advice}"
    if starts_redis:
        try:
            find_binary()
        except DependencyMissing as error:
            yield f"{error}; or name a running one with --redis"


def _find_model_problems(stack: Stack, settings: EngineSettings) -> Iterator[str]:
    """Find what is wrong with the model and its libraries, where workers compute by themselves."""
    if all(worker.stage == "endpoint" for worker in stack.workers):
        return
    embeds = any(worker.stage == "embed" for worker in stack.workers)
    more = "sentence_transformers" if embeds else "vllm" if settings.kind == "vllm" else ""
    needed = ("torch", "transformers", "numpy", "xxhash", *([more] if more else []))
    if missing := [name for name in needed if find_spec(name) is None]:
        extra = "vllm" if missing == ["vllm"] else f"'penstock[worker{',embeddings' if embeds else ''}]'"
        yield f"workers need {', '.join(missing)}: pip install {extra}"
    try:
        if not embeds:
            check_model_here(settings.model, cache=settings.find_cache_directory())
        elif Path(settings.model).expanduser().is_dir():  # the worker downloads another one, and checks it then
            open_checkpoint(settings.model)
    except ModelLoadError as error:
        yield f"cannot load model {settings.model!r}: {error}"


def _find_server_problems(addresses: Addresses, *, starts_redis: bool) -> Iterator[str]:
    streams = [] if starts_redis else split_urls(addresses.stream_url)
    named = [(url, "Redis", "leave it out: one is started then") for url in streams]
    named += [(url, "the KV store's Redis", "unset PENSTOCK_KV_URL") for url in split_urls(addresses.kv_url)]
    silent = [(url, name, advice) for url, name, advice in named if is_redis_silent(url)]
    for url, name, advice in silent:
        yield f"{name} at {format_address(url)} does not answer: start it, or {advice}"
    if is_kafka_silent(addresses):
        yield f"Kafka at {addresses.kafka} {START_KAFKA}"
    elif not silent and not starts_redis:
        try:
            check_access(addresses)
        except AccessRefused as refused:
            yield str(refused)


def list_running_workers(addresses: Addresses) -> list[dict[str, Any]]:
    """Return the heartbeats of the pipeline's workers that live; none where Redis does not answer."""
    try:
        found = read_worker_status(addresses)
    except redis.RedisError:
        return []
    return [worker for worker in found if not _is_gone(worker)]


def _is_gone(worker: Mapping[str, Any]) -> bool:
    """Return whether a heartbeat is that of a process of this host which has ended."""
    try:
        os.kill(int(worker["pid"]), 0)
    except ProcessLookupError:
        return bool(worker["host"] == socket.gethostname())
    except PermissionError:
        pass
    return False


def find_worker_problems(stack: Stack, running: Sequence[Mapping[str, Any]], settings: EngineSettings) -> Iterator[str]:
    """Find why the stack's workers and those that run already cannot serve one pipeline together."""
    addresses = stack.addresses
    advice = "stop them, or choose another PENSTOCK_PIPELINE"
    read_from = {bool(worker["kafka"]) for worker in running if "kafka" in worker}
    if read_from and bool(addresses.kafka) not in read_from:  # two addresses of Kafka may be one cluster
        yield describe_bus_mismatch(running, addresses)
    kinds = {worker.stage for worker in stack.workers}
    others = [one for one in running if not all(may_serve_together(kind, one["stage"]) for kind in kinds)]
    if others and stack.workers:
        does = describe_kind(others[0]["stage"])
        yield f"the pipeline {addresses.pipeline} has a worker that {does}, {describe_workers(others)}: {advice}"
        return
    asks = "endpoint" in kinds
    name = settings.find_served_name()
    others = [worker for worker in running if worker.get("model") not in (None, name)]
    if others and stack.workers and not asks:
        served = ", ".join(sorted({str(worker["model"]) for worker in others}))
        yield (
            f"the pipeline {addresses.pipeline} has workers that serve {served}, not {name}, "
            f"{describe_workers(others)}: {advice}"
        )


def describe_workers(workers: Sequence[Mapping[str, Any]]) -> str:
    """Return workers' names, hosts and process ids."""
    return ", ".join(f"{one['name']} on {one['host']} (pid {one['pid']})" for one in workers)
