"""A gateway that is killed in the middle of a stream: its reader gets all of it at another one, and nothing twice."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.local.stack import Stack
from sim.events import EventSource
from tests.gateways import GatewayProcess

pytestmark = pytest.mark.proof


def test_a_stream_goes_on_at_another_gateway_after_the_first_was_killed(line: Stack, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": "And the king", "max_tokens": 600, "ignore_eos": True}
    asked |= {"temperature": 0.9, "seed": 3}
    whole = httpx.post(f"{line.gateway_url}/v1/completions", json=asked, timeout=None).json()
    with GatewayProcess(line.addresses, tmp_path) as doomed:
        source = EventSource(f"{doomed.url}/v1/completions")
        stream = source.connect(asked | {"stream": True})
        seen = [next(stream) for _ in range(20)]
        doomed.process.kill()
        with suppress(httpx.TransportError):
            for event in stream:
                seen.append(event)  # noqa: PERF402 - the connection ends in the middle
    assert seen[-1].data != "[DONE]"
    source.url = line.gateway_url + source.answer_headers["location"]
    events = [*seen, *source.connect()]
    assert "".join(event.text for event in events) == whole["choices"][0]["text"]
    assert len({event.id for event in events}) == len(events)
    assert (events[-1].data, source.last_event_id) == ("[DONE]", "done")
