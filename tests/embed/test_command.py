"""`penstock up DIRECTORY` with a checkpoint for vectors, as a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.local.processes import find_free_port, start_child
from penstock.ops.status import read_worker_status
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, worker: str, pooling: str, is_on_hub: bool
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
            found = client.result(client.submit(texts=texts), timeout_s=PATIENCE_S).vectors
            assert measure_cosine(read_vectors(found), compute(open_model(directory), texts)) >= 0.999  # or in bf16
            assert client.lag() is not None
    finally:
        child.stop(PATIENCE_S)


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
