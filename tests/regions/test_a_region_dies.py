"""A region dies: two Kafkas with MirrorMaker between them, two Redis servers, processes of both regions."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import cast

import httpx
import pytest

from penstock.bus.connect import connect_bus
from penstock.client.sync import Client
from penstock.errors import BusUnavailable
from penstock.ingest.regions.copies import CopyIndex
from penstock.messages import Result, decode_message
from penstock.names import Pipeline
from penstock.regions import choose_home
from penstock.waiting import wait_until
from sim.chaos.two_regions import Region
from sim.events import EventSource
from sim.mirror_maker import MirroredKafkas
from tests.commands import Terminal
from tests.regions.copied import BUS

LIMIT_S = 400.0
"""It ends hangs only."""
NUM_ANSWERED, NUM_OPEN = 6, 12
ASKED = {"model": "demo", "prompt": "In the beginning", "seed": 7, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def folder(tmp_path: Path, regions: MirroredKafkas) -> Iterator[Path]:
    yield tmp_path
    regions.eu.start()  # for the next test


def test_what_it_accepted_is_answered_by_its_peer_once(
    regions: MirroredKafkas, pipeline: Pipeline, folder: Path, exits: ExitStack, terminal: Terminal
) -> None:
    """A stream goes on with the same bytes, and nothing that was answered is answered again."""
    home = Region("eu", folder, 1, kafka=regions.eu.bootstrap, pipeline=pipeline.name)
    peer = Region("us", folder, 1, kafka=regions.us.bootstrap, pipeline=pipeline.name, copies="eu")
    for region, other in ((home, peer), (peer, home)):
        exits.callback(region.stop)
        region.start(other)
    eu, us = home.stack, peer.stack
    for stack in (us, eu):
        stack.wait_until_ready(LIMIT_S)
    with Client(eu.addresses) as client:
        answered = [client.submit("In the beginning", max_tokens=4) for _ in range(NUM_ANSWERED)]
        for one in answered:
            client.result(one, timeout_s=LIMIT_S)
        first, second, *_ = [key for key in map(str, range(99)) if choose_home("default", key, ("eu", "us")) == "eu"]
        url, keyed = f"{eu.gateway_url}/v1/completions", {"idempotency-key": first}
        undisturbed = httpx.post(url, json=ASKED, headers=keyed, timeout=None).json()
        streamed = EventSource(url, headers={"idempotency-key": second})
        events = streamed.connect({**ASKED, "stream": True})
        began = "".join(next(events).text for _ in range(5))
        stream_id = streamed.answer_headers["x-request-id"]
        opened = [client.submit("In the beginning", max_tokens=400, ignore_eos=True) for _ in range(NUM_OPEN)]
        wanted = {stream_id, *opened}

    with closing(CopyIndex(us.addresses, BUS, "eu")) as index:
        open_key, answered_key = (pipeline.region_key("eu", part) for part in ("open", "answered"))

        def is_copied() -> bool:
            with suppress(BusUnavailable):  # MirrorMaker has made no topics yet
                index.take_all()
            done = {one for one in {*wanted, *answered} if index.client.zscore(answered_key, one) is not None}
            return {*answered} <= done and wanted - done <= open_ids()

        def open_ids() -> set[str]:
            return {one.decode() for one in cast("list[bytes]", index.client.hkeys(open_key))}

        home.kill()
        wait_until(is_copied, LIMIT_S, "the copy has what was accepted")
        regions.eu.kill()
        index.take_all()
        left = open_ids()
    assert left <= wanted

    begun_s = time.monotonic()
    told = terminal("regions", "adopt", "eu", **peer.list_settings())
    assert told.returncode == 0, told.stderr
    with Client(us.addresses) as client:
        for one in left:
            client.result(one, timeout_s=LIMIT_S)
    print(f"rto_s {time.monotonic() - begun_s:.1f} of {len(left)} open requests")  # noqa: T201

    bus = connect_bus(us.addresses, BUS)
    wait_until(lambda: len(bus.read_all(pipeline.results_topic)) >= len(left), LIMIT_S, "all results are out")
    results = [decode_message(Result, message.value) for message in bus.read_all(pipeline.results_topic)]
    assert Counter(result.id for result in results) == Counter(left)
    assert {result.finish_reason for result in results} == {"length"}
    assert not {*answered} & {result.id for result in results}

    assert stream_id in left, "the stream was cut"
    streamed.url = f"{us.gateway_url}/v1/streams/{stream_id}"
    rest = "".join(event.text for event in streamed.connect())
    assert began + rest == undisturbed["choices"][0]["text"]
