"""A region that comes back finds what a peer has adopted of it, before its workers begin."""

import asyncio
import json
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redis

from penstock.bus.connect import connect_bus
from penstock.client.aio import AsyncClient
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings, RegionSettings
from penstock.errors import AdoptionRefused, AnswerInterrupted
from penstock.ingest.regions.adopting import AdoptionMark, AdoptionSettings, adopt_region, give_back, read_marks
from penstock.ingest.regions.returning import JOINED_LASTS_S, AdoptedIds, may_join
from penstock.local.valkey import ValkeyServer
from penstock.names import ADOPTED_REGIONS_KEY, MODELS_KEY, REGION_JOINED_KEY, Pipeline, stream_meta_key
from penstock.record import AppendOutcome, Bound, Record
from penstock.redis.client import redis_client
from penstock.regions import REGION_HEADER
from penstock.worker.joining import wait_until_joined
from sim.waiting import PATIENCE_S, wait_for
from tests.commands import Terminal
from tests.gateways import GatewayProcess
from tests.record.play import alive, claim_decode, claim_prefill, decode, say
from tests.regions.copied import BUS, CopiedRegion
from tests.regions.test_adopting import make_card
from tests.regions.test_copies import SECRET

NONE, PUBLISHING, FINISHED = AdoptedIds(state="none"), AdoptedIds(state="publishing"), AdoptedIds(state="finished")


@pytest.mark.parametrize(
    ("answers", "begins"),
    [
        ((NONE, NONE), True),
        ((NONE, None), False),  # the other one may have adopted it
        ((None, None), False),
        ((FINISHED, None), True),
        ((FINISHED, NONE), True),
        ((PUBLISHING, NONE), False),  # its list has not all ids
        ((PUBLISHING, FINISHED), False),
    ],
)
def test_workers_begin_when_it_is_known_what_peers_have_adopted(
    answers: tuple[AdoptedIds | None, ...], begins: bool
) -> None:
    told = {f"peer-{number}": answer for number, answer in enumerate(answers)}
    assert may_join(told, has_joined=False) is begins
    # One that lives on does not wait for peers that fall silent, but for one that publishes.
    assert may_join(told, has_joined=True) is (PUBLISHING not in answers)


def test_what_was_given_away_is_settled_by_nobody(
    record: Record, server: "redis.Redis", pipeline: Pipeline, addresses: Addresses
) -> None:
    """A worker that has it can write no more, and each of its messages is stale, whenever it comes."""
    held = decode(record, "held", "d1")
    say(record, held, [7, 8])
    give_away(addresses, "held", "unseen")

    assert say(record, held, [9]) == [AppendOutcome.FENCED]
    for name in ("held", "unseen"):
        assert isinstance(claim_prefill(record, name, alive(record, "p1"), "b"), Bound)
        assert isinstance(claim_decode(record, name, alive(record, "d2"), f"{name}-2"), Bound)
    assert isinstance(claim_decode(record, "held", alive(record, "d2"), "j1"), Bound), "the job that was bound"
    give_away(addresses, "held")
    assert server.xlen(pipeline.log_key("held")) == 3
    with Client(addresses) as reader, pytest.raises(AnswerInterrupted, match="us answers this"):
        list(reader.stream("held"))
    assert server.ttl(pipeline.record_key("unseen")) > RecordSettings().keep_s


def give_away(addresses: Addresses, *ids: str) -> None:
    async def run() -> None:
        client = AsyncClient(addresses)
        await client.give_away(ids, "us")
        await client.close()

    asyncio.run(run())


def note_model(client: "redis.Redis", pipeline: Pipeline) -> None:
    """Note a model that was served before: a gateway is ready without workers."""
    note = {"model": "demo", "model_source": "demo", "since": 1.0, "max_model_len": None, "response_template": None}
    client.hset(MODELS_KEY, f"{pipeline.name}:demo", json.dumps(note))


def test_a_region_waits_for_its_peer_and_its_peer_for_it(
    copied_region: CopiedRegion, tmp_path: Path, exits: ExitStack
) -> None:
    """The peer `us` adopts the region, which comes back before that is finished."""
    us, name, pipeline = copied_region.addresses, copied_region.name, copied_region.pipeline
    taken = f"cmpl-open-{name}"
    copied_region.request(taken, headers=make_card(copied_region, taken))
    copied_region.index_all()
    mark = AdoptionMark(1.0, "me", None, {})
    copied_region.client.hset(ADOPTED_REGIONS_KEY, name, mark.encode())
    secret = {"REGION_SECRET": SECRET}
    note_model(copied_region.client, pipeline)
    peer = GatewayProcess(
        us, tmp_path, {**secret, "KAFKA": us.kafka, "REGION_NAME": "us", "REGION_PEERS": f"{name}=http://127.0.0.1:9"}
    )
    exits.enter_context(peer)
    server = exits.enter_context(ValkeyServer(tmp_path / "home"))
    home = Addresses(stream_url=server.url, pipeline=pipeline.name)
    connect_bus(home, BusSettings()).create_topics()
    client = exits.enter_context(redis_client(server.url))
    note_model(client, pipeline)
    own = {"REGION_NAME": name, "REGION_PEERS": f"us={peer.url}"}
    gateway = exits.enter_context(GatewayProcess(home, tmp_path, {**secret, **own}))
    settings = RegionSettings(name=name, peers=own["REGION_PEERS"], secret=SECRET)
    worker = threading.Thread(target=wait_until_joined, args=(home, settings, pipeline))
    worker.start()

    # Who adopts finds the gateway of the region, and leaves the mark as it was.
    seen = RegionSettings(name="us", peers=f"{name}={gateway.url}", secret=SECRET)
    with pytest.raises(AdoptionRefused, match="takes connections"):
        adopt_region(copied_region.client, us, AdoptionSettings(BUS, RecordSettings(), seen), name, "me")
    with pytest.raises(AdoptionRefused, match="has ended what was adopted"):
        give_back(copied_region.client, us, seen, name)
    assert read_marks(copied_region.client)[name] == mark
    assert not client.exists(REGION_JOINED_KEY)
    assert worker.is_alive()

    unseen = AdoptionSettings(BUS, RecordSettings(), RegionSettings())
    adopt_region(copied_region.client, us, unseen, name, "me", force=True)
    wait_for(lambda: client.exists(REGION_JOINED_KEY), "the region has joined")
    assert client.hget(pipeline.record_key(taken), "bound") == b"region@us"
    worker.join(PATIENCE_S)
    assert not worker.is_alive()

    def ask_home(request_id: str) -> httpx.Response:
        return httpx.get(f"{gateway.url}/v1/streams/{request_id}", timeout=None)

    assert ask_home(taken).headers[REGION_HEADER] == f"us; adopted {name}"
    assert (ask_home(other := f"cmpl-other-{name}").status_code, ask_home(other).headers[REGION_HEADER]) == (
        404, f"{name}; home",
    )  # fmt: skip
    copied_region.client.delete(stream_meta_key(taken))
    assert (ask_home(taken).status_code, ask_home(taken).headers[REGION_HEADER]) == (404, f"us; adopted {name}")

    give_back(copied_region.client, us, seen, name)
    assert read_marks(copied_region.client).get(name) is None
    wait_for(lambda: ask_home(taken).headers[REGION_HEADER] == f"{name}; home", "its home answers again")


def test_an_operator_lets_begin_who_waits_and_nobody_who_starts_later(
    tmp_path: Path, terminal: Terminal, exits: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    server = exits.enter_context(ValkeyServer(tmp_path / "home"))
    client = exits.enter_context(redis_client(server.url))
    home = Addresses(stream_url=server.url, pipeline="x")
    client.set(REGION_JOINED_KEY, "from before the region died")
    settings = RegionSettings(name="eu", peers="us=http://127.0.0.1:9", secret=SECRET)
    worker = threading.Thread(target=wait_until_joined, args=(home, settings, Pipeline("x")))
    worker.start()
    wait_for(lambda: caplog.messages or not worker.is_alive(), "it has looked")
    assert worker.is_alive()
    here = {"PENSTOCK_STREAM_URL": home.stream_url, "PENSTOCK_REGION_NAME": "eu"}
    assert "may begin" in terminal("regions", "join", "--force", **here).stdout
    assert 0 < client.ttl(REGION_JOINED_KEY) <= JOINED_LASTS_S
    worker.join(PATIENCE_S)
    client.delete(REGION_JOINED_KEY)
    assert "wait for the answers" in terminal("regions", "join", **here).stdout
