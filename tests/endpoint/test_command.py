"""`penstock worker endpoint` and `penstock up --engine-kind openai`, as commands."""

import sys
import urllib.request
from pathlib import Path

import pytest

from penstock.config.addresses import Addresses
from penstock.endpoint_worker.endpoints import Endpoints, parse_urls
from penstock.endpoint_worker.main import find_model
from penstock.errors import SettingsError
from penstock.local.processes import find_free_port, start_child
from penstock.names import Pipeline, WorkerKind
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.loop import StopSignal
from penstock.worker.process import check_only_kind
from sim.endpoint import MODEL, CountingEndpoint
from sim.waiting import PATIENCE_S, wait_for
from tests.commands import Terminal


def test_the_model_is_that_of_the_first_endpoint_that_answers(addresses: Addresses, endpoint: CountingEndpoint) -> None:
    gone = CountingEndpoint().start()
    gone.stop()
    pool = Endpoints(parse_urls(f"{gone.url},{endpoint.url}", 1))
    beat = Heartbeat(addresses.stream_url, Pipeline(addresses.pipeline), "endpoint", "e", 60.0)
    assert find_model(pool, beat, StopSignal()) == MODEL
    endpoint.models.append("another")
    with pytest.raises(SettingsError, match="PENSTOCK_ENDPOINT_MODEL"):
        find_model(pool, beat, StopSignal())


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "others"),
    [("prefill", ("endpoint", "embed")), ("endpoint", ("auto", "decode", "embed")), ("embed", ("auto", "endpoint"))],
)
def test_one_pipeline_has_one_kind_of_workers(
    addresses: Addresses, kind: WorkerKind, others: tuple[WorkerKind, ...]
) -> None:
    beat = Heartbeat(addresses.stream_url, Pipeline(addresses.pipeline), kind, "first", 60.0)
    beat.write_beat()
    check_only_kind(addresses, kind)
    for other in others:
        with pytest.raises(SettingsError, match="first"):
            check_only_kind(addresses, other)


@pytest.mark.parametrize(
    ("command", "settings", "said"),
    [
        (("worker", "prefill"), {"PENSTOCK_ENGINE_KIND": "openai"}, "penstock worker endpoint"),
        (("worker", "endpoint"), {}, "PENSTOCK_ENDPOINT_URLS names no server"),
        (("up", "--engine-kind", "openai"), {}, "PENSTOCK_ENDPOINT_URLS names no server"),
        (("up", "--url", "nowhere"), {}, "'nowhere' is not"),
    ],
)
def test_what_is_missing_is_said(
    terminal: Terminal, command: tuple[str, ...], settings: dict[str, str], said: str
) -> None:
    done = terminal(*command, **settings)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.proof
def test_one_command_puts_a_pipeline_before_a_server(tmp_path: Path, endpoint: CountingEndpoint) -> None:
    port, gateway_port = find_free_port(), find_free_port()
    command = [
        sys.executable, "-m", "penstock.cli.main", "up", "--engine-kind", "openai", "--url", endpoint.url,
        "--port", str(port), "--gateway-port", str(gateway_port), "--data", str(tmp_path / "data"),
    ]  # fmt: skip
    child = start_child(command, name="up", log=tmp_path / "up.log")
    try:
        wait_for(lambda: "Or:" in (tmp_path / "up.log").read_text(), "it is up")
        said = (tmp_path / "up.log").read_text()
        assert f'"model": "{MODEL}"' in said
        body = b'{"model": "counting", "prompt": "x|", "max_tokens": 3}'
        with urllib.request.urlopen(f"http://127.0.0.1:{gateway_port}/v1/completions", body) as answer:
            assert b'"text":" 0 1 2"' in answer.read().replace(b": ", b":")
    finally:
        child.stop(PATIENCE_S)
