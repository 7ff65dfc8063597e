"""A damaged KV block is a miss, and the answer is right; without the checksum it would not be."""

from collections.abc import Iterator

import pytest

from kvstore import block
from kvstore.block import HEADER_BYTES
from penstock.messages import Request, Sampling
from penstock.names import Pipeline, kv_key
from penstock.settings import Addresses
from tests.pipeline.line import Line
from tests.pipeline.workload import alone, requests

WORK = 6


@pytest.fixture
def line(redis_url: str, pipeline: Pipeline) -> Iterator[Line]:
    with Line(Addresses(pipeline=pipeline.name, stream_url=redis_url)) as made:
        yield made


def work_of(line: Line) -> list[Request]:
    return [
        request.model_copy(update={"sampling": Sampling(temperature=0, max_tokens=24, ignore_eos=True)})
        for request in requests(WORK, line.pipeline.name)[1:]
    ]


def damage(line: Line, request: Request) -> None:
    """Flip one bit of one byte of the prompt's first stored block: the exponent of a number in it."""
    keys = line.prefill.store.keys(request.tenant, list(request.token_ids or ()))
    name = kv_key(keys[0])
    stored = bytearray(line.client.get(name))  # type: ignore[arg-type]
    place = HEADER_BYTES + 4 * 1000 + 3
    stored[place] ^= 0x40
    line.client.set(name, bytes(stored))


def run_damaged(line: Line) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Tokens got and expected, with a byte flipped in a block of each request between prefill and decode."""
    work = work_of(line)
    line.send(*work)
    line.run_prefill(len(work))
    for request in work:
        damage(line, request)
    results = line.run_until(len(work))
    expected = {request_id: answer.token_ids for request_id, answer in alone(work).items()}
    return {result.id: result.token_ids for result in results}, expected


def test_a_flipped_byte_changes_no_token(line: Line) -> None:
    got, expected = run_damaged(line)
    assert got == expected
    assert line.decode.store.tiers[-1].counters.damaged == len(expected)


def test_without_the_checksum_it_would(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the equality test can fail."""
    monkeypatch.setattr(block, "checksum", lambda header, payload: 0)
    got, expected = run_damaged(line)
    assert got.keys() == expected.keys()
    assert got != expected
    assert line.decode.store.tiers[-1].counters.damaged == 0
