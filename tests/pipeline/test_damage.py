"""A damaged KV block is a miss, and the answer is right; without the checksum it would not be."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.config.addresses import Addresses
from penstock.config.settings import KVSettings
from penstock.kvstore.arena import medium
from penstock.kvstore.block import HEADER_BYTES
from penstock.local.valkey import ValkeyServer
from penstock.messages import Request, Sampling
from penstock.names import Pipeline
from sim.kv_faults import BlockCorrupter, count_reads, serve_damaged, tight_settings
from sim.line import InProcessPipeline, serving_engine
from sim.workload import ENGINE_SETTINGS, compute_answers, make_requests
from tests.kvstore.places import DiskPlace, Place, RedisPlace, SharedPlace

WORK = 6
READS = 500
SMALL_POOL = ENGINE_SETTINGS.model_copy(update={"pool_mb": 8})
TIERS = ["shared", "disk", "redis"]


@pytest.fixture
def kv_server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server for blocks alone."""
    with ValkeyServer(tmp_path / "valkey", appendonly=False) as server:
        yield server


@pytest.fixture
def line(
    request: pytest.FixtureRequest, make_line: Callable[..., InProcessPipeline], kv_server: ValkeyServer, tmp_path: Path
) -> InProcessPipeline:
    """A pipeline whose workers hand over through one tier."""
    sizes = dict.fromkeys((f"{name}_mb" for name in TIERS), 0) | {f"{request.param}_mb": 64}
    kv = KVSettings(shared_dir=str(tmp_path), disk_dir=str(tmp_path / "disk"), **sizes)  # type: ignore[arg-type]
    return make_line(kv_url=kv_server.url, kv=kv)


def place_of(line: InProcessPipeline, directory: Path) -> Place:
    (tier,) = serving_engine(line.decode).store.tiers
    if tier.name == "redis":
        return RedisPlace(line.addresses.kv_url)
    return SharedPlace(directory) if tier.name == "shared" else DiskPlace(directory / "disk", directory)


def work_of(line: InProcessPipeline) -> list[Request]:
    return [
        request.model_copy(update={"sampling": Sampling(temperature=0, max_tokens=24, ignore_eos=True)})
        for request in make_requests(WORK, line.pipeline.name)[1:]
    ]


def flip(stored: bytes) -> bytes:
    """Flip one bit: in the exponent of a number."""
    place = HEADER_BYTES + 4 * 1000 + 3
    return stored[:place] + bytes([stored[place] ^ 0x40]) + stored[place + 1 :]


def run_damaged(line: InProcessPipeline, place: Place) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Tokens got and expected, with a byte flipped in a block of each request between prefill and decode."""
    work = work_of(line)
    line.send_requests(*work)
    line.run_prefill(len(work))
    for request in work:
        chain = serving_engine(line.prefill).store.make_hasher(request.tenant)
        place.damage(
            serving_engine(line.decode).store.tiers[0], chain.hash_full_blocks(request.token_ids or [])[0].hash, flip
        )
    results = line.run_until_results(len(work))
    expected = {request_id: answer.token_ids for request_id, answer in compute_answers(work).items()}
    return {result.id: result.token_ids for result in results}, expected


@pytest.mark.parametrize("line", TIERS, indirect=True)
def test_a_flipped_byte_changes_no_token(line: InProcessPipeline, tmp_path: Path) -> None:
    place = place_of(line, tmp_path)
    got, expected = run_damaged(line, place)
    assert got == expected
    assert serving_engine(line.decode).store.tiers[0].counters.damaged == len(expected)
    assert serving_engine(line.decode).store.stats.recomputed_jobs == len(expected)


@pytest.mark.parametrize("line", ["shared"], indirect=True)
def test_without_the_checksum_it_would(
    line: InProcessPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the equality test can fail."""

    def copied(into: memoryview, source: memoryview) -> int:
        into[:] = source
        return 0

    monkeypatch.setattr(medium, "copy_and_hash", copied)
    got, expected = run_damaged(line, place_of(line, tmp_path))
    assert got.keys() == expected.keys()
    assert got != expected
    assert serving_engine(line.decode).store.tiers[0].counters.damaged == 0


def test_damage_everywhere_all_the_time_changes_no_token(
    redis_url: str, kv_server: ValkeyServer, pipeline: Pipeline, tmp_path: Path
) -> None:
    """Flipped, cut and swapped blocks in all tiers while the pipeline serves, and a KV server that is restarted empty.

    The pool is small, so that nearly all is read from the tiers.
    """
    addresses = Addresses(pipeline=pipeline.name, stream_url=redis_url, kv_url=kv_server.url)
    with (
        InProcessPipeline(addresses, kv=tight_settings(tmp_path), engine=SMALL_POOL) as line,
        BlockCorrupter(serving_engine(line.decode).store, kv_server.url, seed=1) as corrupter,
    ):

        def restart(number: int) -> None:
            if number % 2 == 1:
                kv_server.kill()
                kv_server.start()

        answers, wrong = serve_damaged(line, lambda: count_reads(line) >= READS, restart)
        counters = [
            tier.counters
            for store in (serving_engine(line.prefill).store, serving_engine(line.decode).store)
            for tier in store.tiers
        ]
        assert wrong == 0, f"{wrong} of {answers} answers; {dict(corrupter.num_corruptions)}"
        assert sum(one.damaged for one in counters) > 0
        assert {strike.split()[0] for strike in corrupter.num_corruptions} == set(TIERS)
        assert all(tier.read_usage().leased == 0 for tier in serving_engine(line.decode).store.tiers)
