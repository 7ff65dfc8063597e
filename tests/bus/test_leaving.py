"""Where workers share the topics, slow ones leave new messages to faster ones for a while."""

import json
from typing import Any

import pytest

from penstock.bus.contract import Bus, Outgoing
from penstock.bus.streams.bus import StreamsBus
from penstock.bus.streams.client import encode_entry
from penstock.names import Pipeline
from penstock.redis.client import redis_client
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.load import MAX_PATIENCE_S, UNKNOWN_PROMPT_TOKENS, WorkerLoad
from penstock.worker_speed import WorkerSpeed
from tests.bus.buses import CAPACITY, publish_messages, take_deliveries

FAST = WorkerSpeed(0.001, 0.001, 0, step_s=0.02, row_s=0.001, slowdown=1.0)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["prefill", "auto"])
def test_what_is_young_is_left_to_others_and_what_is_old_is_taken(
    kind: Any, streams_bus: Bus, pipeline: Pipeline
) -> None:
    assert isinstance(streams_bus, StreamsBus)
    topic = pipeline.request_topic("interactive")
    with redis_client(streams_bus.url) as client:  # an hour after the epoch, by its id
        entry: Any = encode_entry(Outgoing(topic, b"old", "old"))
        client.xadd(pipeline.stream_key(topic), entry, id="3600000-0")
    publish_messages(streams_bus, [Outgoing(topic, b"young", "young")])
    with streams_bus.join_group(kind, "slow") as slow, streams_bus.join_group(kind, "fast") as fast:
        slow.leave_new(1000.0)
        (old,) = slow.poll(0.3, CAPACITY)
        assert old.value == b"old"
        assert slow.poll(0.3, CAPACITY) == []
        (young,) = take_deliveries(fast, 1)
        assert young.value == b"young"
        publish_messages(streams_bus, [Outgoing(topic, b"later", "later")])
        assert slow.poll(0.3, CAPACITY) == []
        slow.leave_new(0.0)
        (later,) = take_deliveries(slow, 1)
        assert later.value == b"later", "as fast as any"


def read_fastest(beat: Heartbeat) -> WorkerSpeed | None:
    beat.write_beat()
    return beat.fastest


def test_the_fastest_worker_is_known_to_all_as_long_as_it_lives(redis_url: str, pipeline: Pipeline) -> None:
    def make_beat(name: str, speed: WorkerSpeed | None, state: str = "ready") -> Heartbeat:
        beat = Heartbeat(redis_url, pipeline, "auto", name, 60.0, shares_topics=True)
        beat.set_load_source(lambda: {"load": {"speed": speed and speed.as_json()}})
        beat.update_status(state=state)
        return beat

    slow_speed = FAST._replace(prompt_token_s=0.004)
    slow, unknown, fast = make_beat("slow", slow_speed), make_beat("new", None), make_beat("fast", FAST)
    assert read_fastest(unknown) is None
    assert read_fastest(slow) == read_fastest(unknown) == slow_speed
    assert read_fastest(make_beat("going", FAST._replace(prompt_token_s=0.0001), state="draining")) == slow_speed
    assert read_fastest(fast) == read_fastest(slow) == read_fastest(unknown) == FAST
    busy_speed = FAST._replace(prompt_token_s=0.1)  # something else runs on its host
    fast.set_load_source(lambda: {"load": {"speed": busy_speed.as_json()}})
    assert read_fastest(fast) == busy_speed
    assert read_fastest(slow) == read_fastest(fast) == read_fastest(unknown) == slow_speed
    with slow:  # and then it leaves
        pass
    assert read_fastest(unknown) is None
    assert read_fastest(fast) == busy_speed
    with redis_client(redis_url) as client:
        told: Any = client.get(pipeline.fastest_key)
        assert json.loads(told)["worker"] == pipeline.worker_key("auto", "fast")
        left_ms: Any = client.pttl(pipeline.fastest_key)
        assert 0 < left_ms <= 240_000


def test_a_worker_waits_as_long_as_it_would_be_later_and_lets_less_wait() -> None:
    load = WorkerLoad()
    for mine, fastest in ((None, FAST), (FAST, None), (FAST, FAST), (FAST._replace(prompt_token_s=0.0014), FAST)):
        assert load.compare_speed(mine, fastest) == 0.0
        assert load.waiting_share == 1.0
    slow = FAST._replace(prompt_token_s=0.004, step_s=0.08)
    assert load.compare_speed(slow, FAST) == pytest.approx(UNKNOWN_PROMPT_TOKENS * 0.003 + 0.06)
    assert load.waiting_share == 0.25
    load.mean_computed_tokens["interactive"].add(1000.0)
    assert load.compare_speed(slow, FAST) == pytest.approx(3.06)
    assert load.compare_speed(FAST._replace(prompt_token_s=1.0), FAST) == MAX_PATIENCE_S
    assert load.compare_speed(FAST, FAST) == 0.0
    assert load.waiting_share == 1.0
