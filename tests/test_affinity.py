"""What belongs together goes together, and what is too much for one partition does not."""

import math
import random
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bus.affinity import (
    AFFINITY_CHARS,
    AFFINITY_TOKENS,
    HALF_LIFE_S,
    MAX_COUNTED_KEYS,
    REQUESTS_PER_PARTITION,
    AffinityPartitioner,
    compute_affinity,
    rank_partitions,
)
from penstock.bus.contract import Outgoing
from penstock.cli.demo import PROMPTS
from penstock.client.core import RequestFields, make_request, prepare_message
from penstock.config.settings import BusSettings
from penstock.messages import Request, encode_request
from penstock.names import Pipeline

num_partitions = st.integers(1, 40)


def affinity(**fields: Any) -> str:
    return compute_affinity(make_request(None, cast(RequestFields, fields)))


def chat(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": turn} for number, turn in enumerate(turns)]


# compute_affinity


def test_a_session_counts_more_than_the_prompt() -> None:
    one = affinity(prompt="one", session="s")
    assert one == affinity(prompt="two", session="s") == affinity(token_ids=[1], session="s")
    assert one != affinity(prompt="one", session="t")
    assert one != affinity(prompt="one")
    assert affinity(prompt="one", session="one") != affinity(prompt="one")


def test_each_of_the_two_workers_of_the_demo_reads_a_prompt() -> None:
    num_partitions = BusSettings().partitions
    chosen = {rank_partitions(affinity(prompt=prompt), num_partitions)[0] for prompt, _ in PROMPTS}
    assert len(chosen) > num_partitions / 2


def test_tenants_do_not_meet() -> None:
    assert affinity(prompt="one", tenant="a") != affinity(prompt="one", tenant="b")
    assert affinity(prompt="one", session="s", tenant="a") != affinity(prompt="one", session="s", tenant="b")
    assert affinity(prompt="c", session="bc", tenant="a") != affinity(prompt="c", session="c", tenant="ab")


@pytest.mark.parametrize(
    ("field", "beginning"), [("prompt", "é" * (AFFINITY_CHARS - 1) + "e"), ("token_ids", list(range(AFFINITY_TOKENS)))]
)
def test_only_the_beginning_of_a_prompt_counts(field: str, beginning: Any) -> None:
    assert affinity(**{field: beginning}) == affinity(**{field: beginning + beginning[:3]})
    assert affinity(**{field: beginning}) != affinity(**{field: beginning[:-1]})
    assert affinity(**{field: beginning}) != affinity(**{field: beginning[:-1] * 2})


def test_a_chat_keeps_its_affinity_from_turn_to_turn() -> None:
    first = "x" * AFFINITY_CHARS
    assert affinity(messages=chat(first)) == affinity(messages=chat(first, "answer", "question"))
    assert affinity(messages=chat(first)) == affinity(messages=chat(first + "y"))
    halves = chat("x" * (AFFINITY_CHARS // 2), "y" * (AFFINITY_CHARS // 2))
    assert affinity(messages=halves) == affinity(messages=[*halves, {"role": "user", "content": "z"}])
    assert affinity(messages=chat("ab", "c")) != affinity(messages=chat("a", "bc"))
    assert affinity(messages=chat("a")) != affinity(messages=[{"role": "system", "content": "a"}])


def test_nothing_else_of_a_request_counts() -> None:
    one = affinity(prompt="x", id="a", max_tokens=3, model="m", deadline=9e9, klass="batch")
    assert one == affinity(prompt="x", id="b", temperature=0.5)


def test_what_the_client_sends_has_it() -> None:
    request = Request(id="r", prompt="x", session="s")
    span, message = prepare_message(Pipeline("p"), encode_request(request))
    span.end()
    assert (message.affinity, message.key) == (compute_affinity(request), "r")
    assert b'"session":"s"' in message.value
    assert Outgoing("t", b"").affinity is None


# rank_partitions


@given(st.text(max_size=9), num_partitions)
def test_a_new_partition_takes_keys_and_moves_no_other(key: str, count: int) -> None:
    more = [partition for partition in rank_partitions(key, count + 1) if partition != count]
    assert tuple(more) == rank_partitions(key, count)
    assert sorted(more) == list(range(count)), "each once"


def test_keys_are_dealt_out_evenly() -> None:
    firsts = Counter(rank_partitions(str(number), 8)[0] for number in range(4000))
    assert set(firsts) == set(range(8))
    assert all(400 < count < 600 for count in firsts.values())


def test_a_ranking_is_the_same_in_every_process_and_version() -> None:
    assert rank_partitions("penstock", 8) == (6, 5, 1, 4, 2, 0, 3, 7)


# AffinityPartitioner

DRAWS = st.lists(st.tuples(st.integers(0, 30), st.floats(0, 3)), max_size=300)


@given(DRAWS, num_partitions)
def test_a_partition_is_always_among_the_first_of_the_keys_own(draws: list[tuple[int, float]], count: int) -> None:
    partitioner, now_s, seen = AffinityPartitioner(), 0.0, Counter[str]()
    for number, passed_s in draws:
        key, now_s = str(number), now_s + passed_s
        seen[key] += 1
        width = max(1, 2 * math.ceil(seen[key] / REQUESTS_PER_PARTITION))
        assert partitioner.choose_partition(key, count, now_s) in rank_partitions(key, count)[:width]


@given(st.integers(2, 40), st.integers(0, 2**32))
def test_a_cold_key_always_goes_to_one_partition(count: int, seed: int) -> None:
    """Cold: no more than its share of the partitions, whatever the others do."""
    order = random.Random(seed)
    keys = [f"warm{number}" for number in range(3 * count)]
    partitioner, found = AffinityPartitioner(), set()
    for number in range(40):
        order.shuffle(keys)
        for key in keys:
            partitioner.choose_partition(key, count, number / 100)
        found.add(partitioner.choose_partition("cold", count, number / 100))
    assert found == {rank_partitions("cold", count)[0]}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16, 50])
def test_a_key_with_all_the_traffic_reaches_all_partitions_evenly(count: int) -> None:
    partitioner = AffinityPartitioner()
    for _ in range(REQUESTS_PER_PARTITION * count):
        partitioner.choose_partition("hot", count, 0.0)
    found = Counter(partitioner.choose_partition("hot", count, 0.0) for _ in range(count * 10))
    assert found == dict.fromkeys(range(count), 10)


@given(st.floats(0.02, 1), st.integers(1, 32), st.integers(0, 2**32))
def test_a_key_gets_about_its_share_of_the_partitions(share: float, count: int, seed: int) -> None:
    order = random.Random(seed)
    partitioner, found = AffinityPartitioner(), []
    for number in range(4000):
        if order.random() < share:
            found.append(partitioner.choose_partition("hot", count, number / 1000))
        else:
            partitioner.choose_partition(str(order.randrange(10_000)), count, number / 1000)
    recent = Counter(found[-len(found) // 4 :])
    fair = math.ceil(share * count)
    assert math.floor(share * count / 2) <= len(recent) <= 2 * fair + 1
    assert rank_partitions("hot", count)[0] in recent
    # and none of them carries much more than a partition's share of all requests
    assert recent.most_common(1)[0][1] / sum(recent.values()) * share < 2.2 / count


def test_a_key_that_cools_down_comes_home() -> None:
    partitioner = AffinityPartitioner()
    for _ in range(64):
        partitioner.choose_partition("hot", 4, 0.0)
    assert len({partitioner.choose_partition("hot", 4, 0.0) for _ in range(8)}) == 4
    assert {partitioner.choose_partition("hot", 4, 10 * HALF_LIFE_S) for _ in range(8)} == {
        rank_partitions("hot", 4)[0]
    }


def test_who_chats_alone_is_not_hot() -> None:
    partitioner = AffinityPartitioner()
    assert len({partitioner.choose_partition("chat", 4, float(second)) for second in range(1000)}) == 1


def test_hot_keys_are_counted_on_beside_more_keys_than_are_kept() -> None:
    partitioner, found = AffinityPartitioner(), []
    for number in range(3 * MAX_COUNTED_KEYS):
        partitioner.choose_partition(str(number), 4, 0.0)
        found.append(partitioner.choose_partition("hot", 4, 0.0))
    assert len(set(found[-8:])) == 2  # it is half of all requests


def test_a_clock_that_stands_or_goes_back_does_no_harm() -> None:
    partitioner = AffinityPartitioner()
    assert {partitioner.choose_partition("x", 4, now_s) for now_s in (5.0, 5.0, 3.0, 1e300, 0.0)} == {
        rank_partitions("x", 4)[0]
    }
