"""Traces of placement: their lengths are those published, and prompts share what chats share."""

import hashlib
import json
import statistics
from pathlib import Path

import pytest

from penstock.plan.placing import PlacedRequest
from sim.placement.traces import SHAPES, make_requests, name_blocks, read_requests

SIZE = 128


def count_found(requests: list[PlacedRequest]) -> float:
    """Return the share of the prompts' full blocks that a request before had."""
    known: set[bytes] = set()
    found = total = 0
    for request in requests:
        prompt = request.keys[: request.prompt_tokens // SIZE]
        found += next((count for count, key in enumerate(prompt) if key not in known), len(prompt))
        total += len(prompt)
        known.update(request.keys)
    return found / max(1, total)


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "found"),
    [
        ("mooncake_conversation", 12_035, 343, 0.37),
        ("mooncake_toolagent", 8596, 182, 0.59),
        ("azure_conversation", 1155, 211, 0.0),
    ],
)
def test_lengths_and_hits_are_those_published(name: str, prompt: float, answer: float, found: float) -> None:
    requests = make_requests(SHAPES[name], 3.0, 1800.0, SIZE)
    assert len(requests) == pytest.approx(3.0 * 1800, rel=0.1)
    assert statistics.fmean(one.prompt_tokens for one in requests) == pytest.approx(prompt, rel=0.12)
    assert statistics.fmean(one.output_tokens for one in requests) == pytest.approx(answer, rel=0.12)
    assert count_found(requests) == pytest.approx(found, abs=0.06)


def find_home(request: PlacedRequest) -> bytes:
    assert request.chain is not None
    return request.chain.home


def test_chats_with_one_system_prompt_have_one_beginning_and_homes_of_their_own() -> None:
    requests = make_requests(SHAPES["one_system_prompt"], 4.0, 60.0, SIZE)
    chains = [one.chain for one in requests if one.chain is not None]
    assert len({one.links[0] for one in chains}) == len({one.links[7] for one in chains}) == 1
    assert len({one.links[8] for one in chains}) > 1
    assert [link.length for link in chains[0].links[:10]] == [64, 128, 192, 256, 320, 384, 448, 500, 628, 756], (
        "a link ends the system prompt; after eight their pieces are twice as long"
    )
    assert len({one.home for one in chains}) == len({one.id.rpartition(".")[0] for one in requests}) > 20


def test_an_adversary_names_another_session_each_time() -> None:
    requests = make_requests(SHAPES["adversary"], 4.0, 300.0, SIZE)
    chats = [one.id.rpartition(".")[0] for one in requests]
    assert 0.2 < sum(one.session == one.id for one in requests) / len(requests) < 0.45
    assert len({find_home(one) for one in requests}) > len(set(chats))


def test_bursts_are_ten_seconds_of_each_minute() -> None:
    requests = make_requests(SHAPES["bursty"], 4.0, 1200.0, SIZE)
    begun = [one for one in requests if one.id.endswith(".0")]
    assert sum(one.at_s % 60 < 10 for one in begun) / len(begun) == pytest.approx(6 / 11, abs=0.1), "six against five"


def test_names_of_blocks_are_those_of_all_before_them() -> None:
    one, other = [("system", 20), ("user 1", 30)], [("system", 20), ("user 2", 30)]
    assert len(name_blocks(one, 16)) == 3
    assert name_blocks(one, 16)[0] == name_blocks(other, 16)[0]
    assert not set(name_blocks(one, 16)[1:]) & set(name_blocks(other, 16)), "they end differently from token 20 on"
    assert name_blocks([*one, ("answer", 14)], 16)[:3] == name_blocks(one, 16)


def test_a_recorded_trace_shares_what_its_hash_ids_say(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 500, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 900, "input_length": 600, "output_length": 5, "chat": "c", "class": "batch"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    first, second, third = read_requests(file, SIZE)
    assert [one.prompt_tokens for one in (first, second, third)] == [1000, 1500, 600]
    assert find_home(first) == find_home(second) != find_home(third)
    assert find_home(third) == hashlib.blake2b(b"c", digest_size=16).digest(), "the trace names the chat"
    assert third.priority_class == "batch"
    assert count_found([first, second, third]) == pytest.approx((0 + 7 + 0) / (7 + 11 + 4))
