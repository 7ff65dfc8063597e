"""`penstock up DIRECTORY` with a checkpoint for vectors, as a command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.local.processes import find_free_port, start_child
from penstock.ops.live import LiveWatch
from penstock.ops.status import read_worker_status
from penstock.top.panels import RATE_TITLES, build_latencies, build_rates, build_worker_rows
from sim.waiting import PATIENCE_S, wait_for
from tests.commands import Terminal
from tests.embed.checkpoints import draw_text, write_checkpoint
from tests.embed.conftest import open_model
from tests.embed.test_model import compute, measure_cosine
from tests.embed.test_worker import read_vectors


@pytest.mark.parametrize(
    ("name", "worker", "pooling", "is_on_hub"),
    [("bert", "embed", "mean", False), ("mistral", "auto", "lasttoken", False), ("qwen3", "auto", "lasttoken", True)],
)
def test_one_command_serves_a_checkpoint_for_vectors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    terminal: Terminal,
    name: str,
    worker: str,
    pooling: str,
    is_on_hub: bool,
) -> None:
    """Also one of the hub by its name, here from the hub's cache."""
    cached = tmp_path / "hub" / "models--org--tiny"
    directory = cached / "snapshots" / ("c0ffee" + "0" * 34) if is_on_hub else tmp_path / "tiny"
    model, source = ("org/tiny", "org/tiny") if is_on_hub else ("tiny", str(directory))
    write_checkpoint(directory, name, prompts={"query": "bar "}, default_prompt_name="query")
    if is_on_hub:
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(directory.name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    port, log = find_free_port(), tmp_path / "up.log"
    command = [
        sys.executable, "-m", "penstock.cli.main", "up", source, "--port", str(port),
        "--gateway-port", str(find_free_port()), "--data", str(tmp_path / "data"),
    ]  # fmt: skip
    child = start_child(command, name="up", log=log)
    try:
        wait_for(lambda: "Penstock is up" in log.read_text(), "it is up")
        addresses = Addresses(stream_url=f"redis://127.0.0.1:{port}/0", kafka="")
        (beat,) = read_worker_status(addresses)
        assert (beat["stage"], beat["model"], beat["model_source"]) == (worker, model, source)
        assert (beat["task"], beat["dimensions"], beat["pooling"]) == ("embed", 48, pooling)
        assert (beat["prompts"], beat["default_prompt"], beat.get("matryoshka")) == ({"query": "bar "}, "query", None)
        line = next(line for line in log.read_text().splitlines() if line.startswith("Try: curl"))
        answer = subprocess.run(["sh", "-c", line.removeprefix("Try: ")], capture_output=True, check=True, text=True)
        assert len(json.loads(answer.stdout)["data"][0]["embedding"]) == 48
        with Client(addresses) as client:
            texts = [draw_text(4), draw_text(9)]
            request_id = client.submit(texts=texts)
            found = client.result(request_id, timeout_s=PATIENCE_S).vectors
            assert measure_cosine(read_vectors(found), compute(open_model(directory), texts)) >= 0.999  # or in bf16
            assert client.lag() is not None
            check_what_is_shown(addresses, client, worker)
        here = {"PENSTOCK_STREAM_URL": addresses.stream_url}
        wait_for(lambda: "time " in terminal("explain", request_id, **here).stdout, "its spans have come")
        told = terminal("explain", request_id, **here).stdout
        assert "texts   2, to vectors of 48 numbers" in told
        assert "output tokens" not in told
        assert ("compute texts  embed-0" if worker == "embed" else "prefill  auto-0") in told
        trace = tmp_path / "trace.jsonl"
        assert terminal("topics", "record", str(trace), **here).returncode == 0
        # However fast the texts above were sent, and are computed here.
        planned = terminal("plan", "--trace", str(trace), "--model", model, "--ttft-s", "1000000", **here)
        assert "embed or auto workers" in planned.stdout, planned.stderr
    finally:
        child.stop(PATIENCE_S)


def check_what_is_shown(addresses: Addresses, client: Client, worker: str) -> None:
    watch = LiveWatch(addresses, BusSettings())
    look: dict[str, Any] = {}

    def is_shown() -> bool:
        client.result(client.submit(texts=[draw_text(9)]), timeout_s=PATIENCE_S)
        look.update(watch.read_latest())
        (one,) = look["workers"]
        return bool(one["texts_per_s"] and one["tokens_per_s"] and look["rates"]["texts_per_s"])

    wait_for(is_shown, "texts are shown")
    assert 0 < look["text_s"]["p50"] <= look["text_s"]["p99"]
    history = {title: [look["rates"][title]] for title in RATE_TITLES}
    drawn = [list(panel.columns[0].cells) for panel in (build_rates(look, history), build_latencies(look))]
    assert drawn == [[*RATE_TITLES.values()], ["TTFT", "ITL", "texts"]]
    ((kind, *_, pool),) = build_worker_rows(look, "kind")
    assert (str(kind), str(pool).endswith(" texts/s")) == (worker, worker == "embed")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("up", "DIR", "--auto", "2"), "of which one worker computes vectors or scores"),
        (("up", "DIR", "--decode", "1"), "of which one worker computes vectors or scores"),
    ],
)
def test_numbers_of_other_workers_are_refused(
    tmp_path: Path, terminal: Terminal, command: tuple[str, ...], said: str
) -> None:
    directory = write_checkpoint(tmp_path / "tiny")
    done = terminal(*(str(directory) if one == "DIR" else one for one in command))
    assert done.returncode == 1
    assert said in done.stderr
