"""Where workers pull from one stream, slow ones leave requests to faster ones, and wait for none that takes none."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from penstock.bus.contract import Bus, Member, Outgoing
from penstock.bus.placement import WorkerBeat
from penstock.bus.streams.bus import StreamsBus
from penstock.bus.streams.client import encode_entry
from penstock.bus.streams.joined import JoinedStreams
from penstock.bus.streams.pull import Share, find_share
from penstock.names import CLASSES, Pipeline
from penstock.redis.client import redis_client
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.load import WorkerLoad
from penstock.worker_speed import WorkerSpeed
from tests.bus.buses import CAPACITY, publish_messages, take_deliveries

FAST = WorkerSpeed(prompt_token_s=1.0, idle_prompt_token_s=1.0, num_rows=0)
SLOW = WorkerSpeed(prompt_token_s=4.0, idle_prompt_token_s=4.0, num_rows=0)
"""So slow that nothing is computed while a test runs."""


def write_beat(
    bus: Bus,
    kind: Any,
    name: str,
    speed: WorkerSpeed | None,
    *,
    state: str = "ready",
    capacity: int = 8,
    period_s: float = 60.0,
) -> str:
    """Write a heartbeat, and return its key."""
    assert isinstance(bus, StreamsBus)
    beat, load = Heartbeat(bus.url, bus.pipeline, kind, name, period_s), WorkerLoad()
    load.capacities = dict.fromkeys(CLASSES, capacity)
    told = load.summarize_load([], Counter(), dict.fromkeys(CLASSES, ()), dict.fromkeys(CLASSES, 0))
    beat.set_load_source(lambda: {"load": told | {"speed": speed and speed.as_json()}})
    beat.update_status(state=state)
    beat.take_name()
    return bus.pipeline.worker_key(kind, name)


def read_beats(member: Member) -> None:
    """Let a member read the heartbeats, as the renewal of its session does."""
    reader: Any = member._requests if isinstance(member, JoinedStreams) else member
    reader._beats_at_s = -math.inf
    for call in reader.build_renewal(30.0):
        call.run(reader.client)
        call.read_reply()


def publish_requests(bus: Bus, pipeline: Pipeline, names: Iterable[str]) -> None:
    topic = pipeline.request_topic("interactive")
    publish_messages(bus, [Outgoing(topic, name.encode(), name) for name in names])


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["prefill", "auto"])
def test_a_slow_worker_takes_what_would_come_later_elsewhere(kind: Any, streams_bus: Bus, pipeline: Pipeline) -> None:
    """It takes four times as long: of five that are left, it would have done one when the other has done four."""
    write_beat(streams_bus, kind, "slow", SLOW)
    write_beat(streams_bus, "auto", "fast", FAST)
    with streams_bus.join_group(kind, "slow") as slow, streams_bus.join_group("auto", "fast") as fast:
        publish_requests(streams_bus, pipeline, "a")
        read_beats(slow)
        read_beats(fast)
        assert slow.poll(0.3, CAPACITY) == []
        publish_requests(streams_bus, pipeline, "bcd")
        assert [one.value for one in slow.poll(0.3, CAPACITY)] == [b"a"]
        assert slow.poll(0.3, CAPACITY) == [], "it has one to do"
        assert [one.value for one in take_deliveries(fast, 3)] == [b"b", b"c", b"d"], "it leaves nothing"
        topic = pipeline.request_topic("batch")
        publish_messages(streams_bus, [Outgoing(topic, b"batch", "batch")])
        assert [one.value for one in take_deliveries(slow, 1)] == [b"batch"]


@pytest.mark.parametrize("other", [
    None,
    {"state": "draining"}, {"state": "degraded"}, {"state": "loading"},
    {"capacity": 0},  # full of answers, as no prompt waits
    {"speed": None},
    {"speed": SLOW._replace(prompt_token_s=2.8)},
    {"kind": "decode"}, {"kind": "endpoint"},
    {"period_s": 0.1},  # and it is not heard of again
], ids=str)  # fmt: skip
def test_nothing_is_left_to_a_worker_that_takes_none(
    other: dict[str, Any] | None, streams_bus: Bus, pipeline: Pipeline
) -> None:
    write_beat(streams_bus, "auto", "slow", SLOW)
    if other is not None:
        write_beat(streams_bus, **{"kind": "auto", "name": "fast", "speed": FAST} | other)
    publish_requests(streams_bus, pipeline, "abc")
    with streams_bus.join_group("auto", "slow") as slow:
        read_beats(slow)
        assert [one.value for one in take_deliveries(slow, 3)] == [b"a", b"b", b"c"]


def test_when_the_fast_worker_is_gone_the_slow_one_takes_all(streams_bus: Bus, pipeline: Pipeline) -> None:
    assert isinstance(streams_bus, StreamsBus)
    write_beat(streams_bus, "auto", "slow", SLOW)
    fast = write_beat(streams_bus, "auto", "fast", FAST)
    with streams_bus.join_group("auto", "slow") as slow, redis_client(streams_bus.url) as client:
        publish_requests(streams_bus, pipeline, "ab")
        read_beats(slow)
        assert slow.poll(0.3, CAPACITY) == []
        client.delete(fast)
        read_beats(slow)
        assert [one.value for one in take_deliveries(slow, 2)] == [b"a", b"b"]


def test_what_has_waited_for_a_heartbeats_life_is_taken(streams_bus: Bus, pipeline: Pipeline) -> None:
    """The fast worker lives, says that it takes requests, and does not."""
    assert isinstance(streams_bus, StreamsBus)
    write_beat(streams_bus, "auto", "slow", SLOW)
    write_beat(streams_bus, "auto", "fast", FAST)
    topic = pipeline.request_topic("interactive")
    with redis_client(streams_bus.url) as client:  # an hour after the epoch, by its id
        entry: Any = encode_entry(Outgoing(topic, b"old", "old"))
        client.xadd(pipeline.stream_key(topic), entry, id="3600000-0")
    publish_requests(streams_bus, pipeline, ["young"])
    with streams_bus.join_group("auto", "slow") as slow:
        read_beats(slow)
        assert [one.value for one in slow.poll(0.3, CAPACITY)] == [b"old"]
        assert slow.poll(0.3, CAPACITY) == []


def make_beat(worker: str, speed: WorkerSpeed | None, waiting: int = 0) -> WorkerBeat:
    nothing, tokens = dict.fromkeys(CLASSES, ()), dict.fromkeys(CLASSES, waiting)
    return WorkerBeat(
        worker, 0.0, 3.0, nothing, tokens,
        speed=speed, mean_prompt_tokens=100.0, takes_requests=True,
    )  # fmt: skip


def test_what_waits_here_is_computed_meanwhile_and_what_waits_elsewhere_counts() -> None:
    quick, other = SLOW._replace(prompt_token_s=0.004), FAST._replace(prompt_token_s=0.001)
    beats = [make_beat("me", quick), make_beat("a", other, 100), make_beat("b", other, 200)]

    def count(beats: list[WorkerBeat], taken_s: list[float], now_s: float, waiting: int) -> int:
        share = find_share("me", beats, taken_s, now_s)
        assert share is not None
        return int((waiting + share.ahead) * share.part)

    assert find_share("me", beats, [], 1.0) == pytest.approx(Share(2 + 3, 1 / 9, 3.0))
    assert (count(beats, [], 1.0, 3), count(beats, [], 1.0, 4), count(beats, [], 1.0, 13)) == (0, 1, 2)
    assert (count(beats, [1.0], 1.0, 11), count(beats, [1.0], 1.0, 12)) == (0, 1), "one has to be done before"
    assert (count(beats, [1.0], 1.125, 9), count(beats, [1.0], 1.125, 10)) == (0, 1), "some of it is done"
    assert count(beats, [0.5], 1.25, 4) == 1, "it is done"
    busy = [make_beat("me", quick, 500), *beats[1:]]
    assert (count(busy, [], 1.0, 23), count(busy, [], 1.0, 24)) == (0, 1), "half of it is left"
    assert find_share("a", beats, [], 1.0) is None, "nobody is faster"
    assert find_share("me", beats, [], 3.0) is None, "what is not known holds nothing back"
    assert find_share("me", beats[1:], [], 1.0) is None
    assert find_share("me", [make_beat("me", None), *beats[1:]], [], 1.0) is None
