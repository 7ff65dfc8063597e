"""All workers and gateways are replaced, one after the other, by the same tree with its version raised, under load.

Readers stream answers all the time. A gateway that leaves ends its streams, and their readers go on at the other one
behind the last event that they have seen, as any client may. A stream is broken if its reader does not get each token
once and in order, with the text of an undisturbed answer.
"""

import importlib.metadata
import itertools
import os
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from penstock.local.processes import find_free_port
from penstock.local.stack import ProcessSlot, Stack
from sim.events import EventSource, ServerSentEvent
from sim.waiting import wait_for

SETTINGS = {
    "PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu", "PENSTOCK_ENGINE_POOL_MB": "128",
    "PENSTOCK_WORKER_DRAIN_S": "0.5", "PENSTOCK_GATEWAY_MAX_WAIT_S": "100000",
}  # fmt: skip
"""Workers that leave have requests to hand back, as their answers take longer than they may go on."""
NUM_READERS, NUM_PROMPTS, ANSWER_TOKENS = 6, 4, 200
RAISED = "999.0.0"
START_S, REST_S = 240.0, 3.0
"""How long a process may take until it serves; and how long the load goes on behind each replacement."""


@dataclass
class Readers:
    """Clients that stream one answer after the other from two gateways."""

    urls: list[str]
    texts: list[str]
    """The undisturbed answers to the prompts."""
    num_whole: int = 0
    num_resumed: int = 0
    """Streams that were read at more than one connection."""
    broken: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def read_all(self, reader: int) -> None:
        """Read streams until it is over; those under way are read to their ends."""
        for number in itertools.count(reader):
            if self.is_over.is_set():
                return
            events, num_connections = read_stream(self.urls, number, make_body(number % NUM_PROMPTS))
            positions = [int(event.id.partition("-")[0]) for event in events if event.id and event.text]
            text = "".join(event.text for event in events)
            self.num_resumed += num_connections > 1
            if text == self.texts[number % NUM_PROMPTS] and positions == sorted(set(positions)):
                self.num_whole += 1
            else:
                self.broken.append(f"stream {number}: {len(events)} events by {num_connections} connections: {text!r}")


def make_body(number: int) -> dict[str, object]:
    """Return the body of a request for one of the prompts."""
    asked = {"model": "demo", "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    return asked | {"prompt": f"Chapter {number}. In the beginning"}


def read_stream(urls: list[str], first: int, body: dict[str, object]) -> tuple[list[ServerSentEvent], int]:
    """Read a stream to its end, at one gateway after the other; return its events, and by how many connections."""
    events, path, source = list[ServerSentEvent](), "", EventSource("")
    turn = -1
    while True:
        turn += 1
        source.url = urls[(first + turn) % len(urls)] + (path or "/v1/completions")
        with suppress(httpx.TransportError):
            for event in source.connect(None if path else body):
                path = source.answer_headers["location"]
                if event.data == "[DONE]":
                    return events, turn + 1
                if event.event == "message":
                    events.append(event)
                elif "gateway_stopping" not in event.data:  # a typed end
                    return events, turn + 1
        path = path or source.answer_headers.get("location", "")
        if path and source.status in (400, 404):
            return events, turn + 1
        time.sleep(0.05)


def raise_version(directory: Path) -> str:
    """Write a copy of what is installed as `penstock`, with another version, and return the path to search first."""
    installed = Path(str(importlib.metadata.distribution("penstock").locate_file(""))) / (
        f"penstock-{importlib.metadata.version('penstock')}.dist-info"
    )
    copy = directory / f"penstock-{RAISED}.dist-info"
    shutil.copytree(installed, copy)
    lines = (installed / "METADATA").read_text().splitlines(keepends=True)
    told = [f"Version: {RAISED}\n" if line.startswith("Version: ") else line for line in lines]
    (copy / "METADATA").unlink()
    (copy / "METADATA").write_text("".join(told))
    return os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH", ""))))


def replace_process(stack: Stack, slot: ProcessSlot) -> None:
    """Have a process leave, and start the next one in its place; return when it serves."""
    assert slot.child is not None
    slot.child.stop(60.0)
    slot.child = None
    stack._start_slot(slot)  # noqa: SLF001 - it left as it was told to, so it is no death
    stack.wait_until_ready(START_S)


def run_replacement(directory: Path, environment: Mapping[str, str] = SETTINGS) -> tuple[Readers, int]:
    """Replace all processes; return what readers saw, and how many processes were replaced."""
    raised = directory / "raised"
    raised.mkdir(parents=True)
    settings = dict(environment)
    with (
        Stack(directory / "one", prefill=0, decode=0, auto=2, gateway=find_free_port(), environment=settings) as one,
        Stack(
            directory / "other", prefill=0, decode=0, gateway=find_free_port(), environment=settings,
            redis=one.addresses.stream_url,
        ) as other,
    ):  # fmt: skip
        for stack in (one, other):
            stack.wait_until_ready(START_S)
        urls = [stack.gateway_url for stack in (one, other)]
        undisturbed = (read_stream(urls, 0, make_body(number))[0] for number in range(NUM_PROMPTS))
        readers = Readers(urls, ["".join(event.text for event in events) for events in undisturbed])
        threads = [threading.Thread(target=readers.read_all, args=(number,)) for number in range(NUM_READERS)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: readers.num_whole > NUM_READERS, "answers come")
            path, num_replaced = raise_version(raised), 0
            for stack in (one, other):
                stack._environment["PYTHONPATH"] = path  # noqa: SLF001 - users replace the tree itself
                for slot in (*stack.workers, stack.gateway):
                    assert slot is not None
                    replace_process(stack, slot)
                    time.sleep(REST_S)
                    num_replaced += 1
        finally:
            readers.is_over.set()
            for thread in threads:
                thread.join()
        for url in urls:
            if (version := httpx.get(f"{url}/version").json()["version"]) != RAISED:
                readers.broken.append(f"the gateway at {url} has version {version}")
    return readers, num_replaced
