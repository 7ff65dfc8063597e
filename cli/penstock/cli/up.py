"""`penstock up`: the whole pipeline on this machine."""

import json
import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.request import getproxies

import typer
from rich.console import Console

from penstock.autoscale.controller import Bounds
from penstock.bytecode import describe_lost_bytecode
from penstock.cli.autoscale import open_service, parse_bounds
from penstock.cli.error_lines import explain_server_errors
from penstock.cli.generate import format_shell_command
from penstock.cli.up_checks import describe_workers, find_obstacles, list_running_workers
from penstock.config.addresses import Addresses
from penstock.config.settings import EndpointSettings, EngineSettings, GatewaySettings, KVSettings, load_settings
from penstock.config.sources import variable_name
from penstock.endpoint_worker.endpoints import parse_urls
from penstock.engine.loading.vector_files import is_for_embedding, is_for_engine
from penstock.errors import PenstockError, SettingsError
from penstock.local.stack import DEFAULT_REDIS_PORT, SHARED_DIR_VARIABLE, Stack
from penstock.ops.status import read_worker_status
from penstock.threads import CheckedThread
from penstock.worker.loop import StopSignal

READY_TIMEOUT_S = 600.0
DISK_DIR_VARIABLE = "PENSTOCK_KV_STORE_DISK_DIR"
DEFAULT_DISK_MB = 1024
"""The KV store's budget on disk, which outlives a run, unless the settings name one."""


def default_data_directory() -> Path:
    """Return the directory where the embedded stack keeps its data and logs by default."""
    return Path.home() / ".local" / "share" / "penstock"


def load_engine_settings(model: str, served_name: str, endpoint_source: str) -> EngineSettings:
    """Return the engine's settings, in which the command line's model and name go before the environment's.

    Raise `SettingsError` for a model where servers are asked.
    """
    if model and endpoint_source:
        raise SettingsError(
            f"the model {model} has no effect with {endpoint_source}, as servers have their own: leave it out. "
            "--served-name is the name by which callers ask"
        )
    is_path = model not in ("", "demo") and os.path.exists(model)
    given = {"model": os.path.abspath(model) if is_path else model, "served_name": served_name}
    return load_settings(EngineSettings, **{name: value for name, value in given.items() if value})


def build_engine_environment(engine: EngineSettings) -> dict[str, str]:
    """Return the variables of model and served name, as workers need them where the command line has named either."""
    given = {name: str(getattr(engine, name)) for name in ("model", "served_name") if name in engine.model_fields_set}
    return {variable_name(EngineSettings, name): value for name, value in given.items()}


def build_kv_environment(pipeline: str, data: Path | None, console: Console) -> tuple[dict[str, str], list[str]]:
    """Return the workers' KV settings, and a line for each tier that was asked for and cannot be.

    Shared memory is where `penstock kv` looks for it. A tier on disk is added, in the directory of data if one was
    given. A tier that nobody asked for, and for which this host has no room, is told on the console.
    """
    try:
        from penstock.kvstore.room import fit_tiers
    except ImportError:
        return {}, []  # what workers need is said with all else that is missing

    settings = load_settings(KVSettings)
    given = settings.model_fields_set
    changes: dict[str, object] = {} if "disk_mb" in given else {"disk_mb": DEFAULT_DISK_MB}
    if data is not None and not settings.disk_dir and changes.get("disk_mb", settings.disk_mb):
        changes["disk_dir"] = str(data.absolute() / "kv")
    wanted = KVSettings.model_construct(_fields_set=given, **{**settings.model_dump(), **changes})
    fitted, told, refused = fit_tiers(wanted, pipeline)
    for line in told:
        console.print(line)
    return {
        SHARED_DIR_VARIABLE: fitted.shared_dir,
        "PENSTOCK_KV_STORE_DISK_MB": str(fitted.disk_mb),
        DISK_DIR_VARIABLE: fitted.disk_dir,
    }, refused


def build_endpoint_environment(urls: Sequence[str]) -> dict[str, str]:
    """Return the settings of a worker that asks these servers, or those of the settings. Raises `SettingsError`."""
    settings = load_settings(EndpointSettings, **({"urls": ",".join(urls)} if urls else {}))
    parse_urls(settings.urls, settings.max_requests, settings.key, settings.model)
    return {"PENSTOCK_ENGINE_KIND": "openai", "PENSTOCK_ENDPOINT_URLS": settings.urls}


@contextmanager
def free_shared_memory(pipeline: str) -> Iterator[None]:
    """Remove the workers' shared memory when the context ends. Blocks on disk stay."""
    from penstock.kvstore.arena.file import find_arenas, remove_arena

    try:
        yield
    finally:
        for arena in find_arenas(load_settings(KVSettings).shared_dir):
            if arena.pipeline == pipeline:
                remove_arena(arena.path)


def choose_gateway_port(given: int | None) -> int | None:
    """Return the port of the gateway to start; None where its packages are not installed."""
    return (given or load_settings(GatewaySettings).port) if find_spec("fastapi") and find_spec("uvicorn") else None


CURL_PATHS = {"embed": "/v1/embeddings", "score": "/v1/rerank"}
"""Where models are asked that generate no text, by their task."""


def build_curl_body(model: str = "", task: str = "") -> dict[str, object]:
    """Return the body of a request to the gateway, for the model of the settings unless another one is given."""
    texts: dict[str, dict[str, object]] = {
        "embed": {"input": ["In the beginning"]},
        "score": {"query": "What was first?", "documents": ["In the beginning", "At the end"]},
    }
    asked = texts.get(task, {"prompt": "In the beginning", "max_tokens": 40, "stream": True})
    return {"model": model or load_settings(EngineSettings).find_served_name()} | asked


def format_curl_command(gateway_url: str, model: str = "", task: str = "") -> str:
    """Return a shell command that sends this body, by no proxy, and prints the answer."""
    no_proxy = "--noproxy '*' " if getproxies().get("http") else ""
    url = shlex.quote(gateway_url + CURL_PATHS.get(task, "/v1/completions"))
    return f"curl -N {no_proxy}{url} -d '{json.dumps(build_curl_body(model, task))}'"


def find_endpoint_source(url: Sequence[str] | None, engine_kind: str | None) -> str:
    """Return the option or setting that says that servers are asked; empty if workers have an engine of their own.

    Raise `SettingsError` where both are given.
    """
    if url is not None:
        if engine_kind == "own":
            raise SettingsError("--url has no effect with --engine-kind own: leave one of them out")
        return "--url"
    if engine_kind is not None:
        return f"--engine-kind {engine_kind}" if engine_kind == "openai" else ""
    return "PENSTOCK_ENGINE_KIND=openai" if load_settings(EngineSettings).kind == "openai" else ""


def parse_auto(text: str | None) -> tuple[int | None, Bounds | None]:
    """Return the number of `auto` workers to start, and the bounds within which a controller changes it, if it does.

    Raise `SettingsError`.
    """
    if text is None or text.isdecimal():
        return (None if text is None else int(text)), None
    bounds = parse_bounds(text, "--auto")
    if bounds.most is None:
        raise SettingsError(f"--auto {text}: say how many workers this machine has room for, such as --auto {text}4")
    return max(1, bounds.least), bounds


@contextmanager
def follow_load(stack: Stack, bounds: Bounds | None) -> Iterator[Callable[[], list[str]]]:
    """Run a controller beside the stack. Yield what keeps to its numbers, and returns a line for each change."""
    if bounds is None:
        yield list
        return
    decided, is_over = deque[dict[str, Any]](maxlen=1), threading.Event()
    service = open_service(stack.addresses, bounds)
    thread = CheckedThread("autoscale", lambda: service.run_until_stopped(is_over.wait, decided.append))

    def keep_numbers() -> list[str]:
        thread.raise_failure()
        return stack.follow_numbers(decided.pop()) if decided else []

    try:
        yield keep_numbers
    finally:
        is_over.set()
        thread.join()
        service.close()


def choose_workers(counts: Mapping[str, int | None], endpoint_source: str, embed_source: str = "") -> dict[str, int]:
    """Return how many workers of each kind to start: the numbers that are given, else one that does all.

    Raise `SettingsError` if a number is given where one worker asks servers, or computes vectors, instead.
    """
    given = {kind: count for kind, count in counts.items() if count is not None}
    for kind, count in given.items():
        if source := endpoint_source or embed_source:
            raise SettingsError(f"--{kind} {count} has no effect with {source}: leave one of them out")
    usual = {"endpoint": 1} if endpoint_source else {"embed": 1} if embed_source else {"auto": 1}
    return dict.fromkeys(counts, 0) | (given or usual)


def refuse_idle_ports(port: int | None, redis_source: str, gateway_port: int | None, gateway: int | None) -> None:
    """Raise `SettingsError` for the port of a server that is not started."""
    if redis_source and port is not None:
        raise SettingsError(
            f"--port {port} is for a Redis that is started, and {redis_source} names one: leave one out"
        )
    if gateway is None and gateway_port is not None:
        raise SettingsError(
            f"--gateway-port {gateway_port}: no gateway is started without pip install 'penstock[gateway]'"
        )


def refuse_obstacles(obstacles: Sequence[str]) -> None:
    """Raise `PenstockError` with all of them, if there are any."""
    if len(obstacles) > 1:
        listed = "".join(f"\n  {number}. {obstacle}" for number, obstacle in enumerate(obstacles, 1))
        raise PenstockError(f"nothing was started, for {len(obstacles)} reasons:{listed}")
    if obstacles:
        raise PenstockError(obstacles[0])


def up(
    model: Annotated[
        str,
        typer.Argument(
            help="A directory, a GGUF file or a name of the hub; else PENSTOCK_ENGINE_MODEL, else a small demo model."
        ),
    ] = "",
    served_name: Annotated[
        str, typer.Option(help="The name by which callers ask for the model; else PENSTOCK_ENGINE_SERVED_NAME.")
    ] = "",
    kafka: Annotated[str, typer.Option(help="Kafka bootstrap servers; without them the bus is Redis Streams.")] = "",
    redis: Annotated[str, typer.Option(help="A Redis url; without one a server is started.")] = "",
    port: Annotated[
        int | None, typer.Option(help=f"Port of the Redis server that is started, {DEFAULT_REDIS_PORT} by default.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=0, help="Workers that only compute prompts.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Workers that only decode.")] = None,
    auto: Annotated[
        str | None,
        typer.Option(
            help="Workers that do both: one, unless any of the three numbers is given. MIN..MAX: as many as the load "
            "needs, with 0 none while nothing comes."
        ),
    ] = None,
    engine_kind: Annotated[
        Literal["own", "openai"] | None,
        typer.Option(help="`openai`: servers with OpenAI's API compute the answers, and one worker asks them."),
    ] = None,
    url: Annotated[list[str] | None, typer.Option(help="Such a server, http://HOST:8000; may be repeated.")] = None,
    gateway_port: Annotated[int | None, typer.Option(help="Port of the gateway, unless the settings say it.")] = None,
    data: Annotated[Path | None, typer.Option(help="Directory for data, logs, and KV blocks on disk.")] = None,
) -> None:
    """Serve a model on this machine: Redis (where none is given), a worker, or several, and a gateway, until Ctrl-C."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    given = load_settings(Addresses, **({"kafka": kafka} if kafka else {}))
    redis_source = "--redis" if redis else "PENSTOCK_STREAM_URL"
    redis = redis or (given.stream_url if "stream_url" in given.model_fields_set else "")
    directory, gateway = data or default_data_directory(), choose_gateway_port(gateway_port)
    endpoint_source = find_endpoint_source(url, engine_kind)
    refuse_idle_ports(port, redis_source if redis else "", gateway_port, gateway)
    num_auto, bounds = parse_auto(auto)
    engine = load_engine_settings(model, served_name, endpoint_source)
    is_embedding = not endpoint_source and engine.model != "demo" and is_for_embedding(engine.model)
    if (engine_kind or engine.kind) == "own":  # which computes vectors of decoders beside text
        is_embedding = is_embedding and not is_for_engine(engine.model)
    workers = choose_workers(
        {"prefill": prefill, "decode": decode, "auto": num_auto},
        endpoint_source,
        f"{engine.model}, of which one worker computes vectors or scores" if is_embedding else "",
    )
    if bounds is not None and (prefill or decode):
        raise SettingsError(f"--auto {auto} decides on `auto` workers alone: leave --prefill and --decode out")
    port = DEFAULT_REDIS_PORT if port is None else port
    asks_endpoints, has_kv = bool(endpoint_source), not (endpoint_source or is_embedding)
    kv_environment, refused = build_kv_environment(given.pipeline, data, console) if has_kv else ({}, [])
    environment = build_endpoint_environment(url or []) if asks_endpoints else kv_environment
    stack = Stack(
        directory,
        pipeline=given.pipeline,
        kafka=given.kafka,
        redis=redis,
        port=port,
        **workers,
        gateway=gateway,
        most=0 if bounds is None or bounds.most is None else bounds.most,
        environment=environment | build_engine_environment(engine),
    )
    refuse_obstacles([*find_obstacles(stack, None if redis else port, gateway, engine), *refused])
    stop = StopSignal().install()
    stack.stop_asked = stop.__bool__
    if not asks_endpoints and (line := describe_lost_bytecode(engine.find_cache_directory())):
        console.print(line)
    console.print(f"pipeline {stack.addresses.pipeline}; the logs of all processes are in {directory}")
    if redis and (running := list_running_workers(stack.addresses)):
        console.print(f"workers that run already, and that these join: {describe_workers(running)}")
    shared_memory = free_shared_memory(stack.addresses.pipeline) if has_kv else nullcontext()
    with explain_server_errors(stack.addresses), shared_memory, stack:
        wait_until_ready(stack, console, stop)
        if not stop:
            print_hints(stack, console, kv_environment.get(DISK_DIR_VARIABLE, ""))
        with follow_load(stack, bounds) as keep_numbers:
            while not stop:
                for line in (*stack.restart_dead(), *keep_numbers()):
                    console.print(line)
                time.sleep(0.2)
        console.print("stopping")


def wait_until_ready(stack: Stack, console: Console, stop: StopSignal) -> None:
    """Wait until all is ready: on a terminal with a line that changes, else with one for each change."""
    if console.is_terminal:
        with console.status("starting") as status:
            stack.wait_until_ready(READY_TIMEOUT_S, status.update, lambda: bool(stop))
    else:
        stack.wait_until_ready(READY_TIMEOUT_S, console.print, lambda: bool(stop))


def print_hints(stack: Stack, console: Console, kv_directory: str = "") -> None:
    """Print what can be done now, as commands that work from another shell."""
    served = next((one for one in read_worker_status(stack.addresses) if one.get("model")), {})
    model, task = str(served.get("model", "")), str(served.get("task", ""))
    console.print(f"Penstock is up: {f'{model}, ' if model else ''}pipeline {stack.addresses.pipeline}")
    if not task:
        generate = format_shell_command(stack.addresses, "penstock generate 'In the beginning'")
        console.print(f"Try: {generate}    (Ctrl-C stops)")
    if kv_directory and kv_directory != load_settings(KVSettings).disk_dir:
        command = format_shell_command(stack.addresses, "penstock kv stats")
        console.print(f"KV blocks: {DISK_DIR_VARIABLE}={shlex.quote(kv_directory)} {command}")
    if stack.gateway is not None:
        console.print(f"{'Try:' if task else 'Or: '} {format_curl_command(stack.gateway_url, model, task)}")
        console.print(f"Programs: base URL {stack.gateway_url}/v1, model {model!r}. The page: {stack.gateway_url}/")
