"""Requests on two servers: each keeps its own, and one that is away is an outage of its requests alone."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from penstock.config.settings import RecordSettings
from penstock.local.valkey import ValkeyServer
from penstock.messages import EndEvent
from penstock.names import Pipeline
from penstock.record import (
    AppendOutcome,
    Busy,
    Claim,
    ClaimEvent,
    Record,
    ShardedSession,
    UnclaimedMessage,
    connect_servers,
    open_record,
)
from penstock.redis.client import redis_client
from penstock.redis.servers import choose_server
from sim.waiting import wait_for
from tests.pipeline.site import hanging
from tests.record.play import claim_decode, claim_prefill, end, say

pytestmark = pytest.mark.proof
NAMES = ("left", "right")
IDS = [f"r{number}" for number in range(40)]
LEFT, RIGHT = ([one for one in IDS if choose_server(NAMES, one) == index] for index in range(2))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ValkeyServer, ValkeyServer]]:
    directory: Path = tmp_path_factory.mktemp("servers")
    with ValkeyServer(directory / "left") as left, ValkeyServer(directory / "right") as right:
        yield left, right


@pytest.fixture
def sharded(servers: tuple[ValkeyServer, ValkeyServer], pipeline: Pipeline, exits: ExitStack) -> Record:
    urls = ",".join(f"{server.url}#{name}" for server, name in zip(servers, NAMES, strict=True))
    return exits.enter_context(closing(open_record(connect_servers(urls), pipeline, RecordSettings(lease_s=0.3))))


@pytest.fixture
def sessions(sharded: Record, exits: ExitStack) -> ShardedSession:
    return exits.enter_context(closing(ShardedSession(sharded, "d1")))


def claimed(record: Record, sessions: ShardedSession, request_id: str) -> Claim:
    claim = claim_decode(record, request_id, sessions.id, "j1", b"message")
    assert isinstance(claim, Claim), claim
    sessions.add_claim(claim)
    return claim


def test_a_request_is_on_the_server_of_its_id(
    servers: tuple[ValkeyServer, ValkeyServer], sharded: Record, sessions: ShardedSession, pipeline: Pipeline
) -> None:
    claims = [claimed(sharded, sessions, name) for name in (LEFT[0], RIGHT[0], LEFT[1], RIGHT[1])]
    events = [(claim, claim.next_event(number, "x")) for number, claim in enumerate(claims)]
    assert sharded.append_tokens(events) == [AppendOutcome.OK] * 4
    assert sharded.finish_all([(claim, end(), "") for claim in claims]) == [AppendOutcome.OK] * 4
    for (claim, event), name in zip(events, (0, 1, 0, 1), strict=True):
        assert sharded.read_log(claim.id)[0] == event
        assert isinstance(sharded.read_log(claim.id)[1], EndEvent)
        for index, server in enumerate(servers):
            alone = open_record(connect_servers(server.url), pipeline, sharded.settings)
            assert (alone.read_status(claim.id) is not None) == (index == name)
            alone.close()


def test_what_is_free_is_taken_from_all(sharded: Record, sessions: ShardedSession) -> None:
    waiting = [UnclaimedMessage(name, "", "j1", b"message") for name in LEFT[2:5] + RIGHT[2:5]]
    assert sharded.park_messages("decode", waiting) == []
    assert sharded.count_free("decode") == 6
    wait_for(lambda: sessions.count_free("decode") == 6, "the sessions hear of them")
    taken = sharded.take_over_free("decode", sessions.id, 4)
    sessions.note_taken("decode", 4)
    # A renewal between the two lines above has counted what was taken already, and the next one counts anew.
    wait_for(lambda: sessions.count_free("decode") == 2, "the sessions hear of what is left")
    taken += sharded.take_over_free("decode", sessions.id, 9)
    assert sorted(one.claim.id for one in taken) == sorted(one.id for one in waiting)


@pytest.mark.parametrize("how", ["hangs", "killed"])
def test_one_that_is_away_is_an_outage_of_its_own_requests(
    servers: tuple[ValkeyServer, ValkeyServer], sharded: Record, sessions: ShardedSession, how: str
) -> None:
    """Its tokens are refused and its claims lost, and nothing is raised; all else goes on. When it answers its requests
    are claimed again, with all their tokens.
    """
    mine, others = claimed(sharded, sessions, LEFT[6]), claimed(sharded, sessions, RIGHT[6])
    assert say(sharded, mine, [1, 2]) + say(sharded, others, [1, 2]) == [AppendOutcome.OK] * 4
    server = servers[1]
    before = sessions.id.splitlines()

    def use_both() -> None:
        events = [(claim, claim.next_event(3, "x")) for claim in (others, mine)]
        assert sharded.append_tokens(events) == [AppendOutcome.FENCED, AppendOutcome.OK]
        assert "right" in sharded.current_problem
        assert (others, ClaimEvent.LOST) in sessions.collect_events()
        assert sessions.collect_events() == []
        assert isinstance(claim_decode(sharded, RIGHT[6], sessions.id, "j1"), Busy)
        assert not sharded.release_claim(others)
        assert sharded.finish_all([(others, end(), "")]) == [AppendOutcome.FENCED]
        kept = [UnclaimedMessage(name, "", "j1", b"message") for name in (LEFT[7], RIGHT[7])]
        assert sharded.park_messages("decode", kept) == kept[1:]
        assert [one.claim.id for one in sharded.take_over_free("decode", sessions.id, 9)] == [LEFT[7]]

    if how == "hangs":
        with hanging(server.pid):
            use_both()
    else:
        with closing(redis_client(server.url, 60.0)) as client:  # beside a slow fsync it writes up to two seconds later
            assert client.waitaof(1, 0, 30_000)[0] == 1
        server.kill()
        use_both()
        server.start()
    wait_for(lambda: not sharded.current_problem, "it answers again")
    again = claimed(sharded, sessions, RIGHT[6])
    assert (again.num_tokens, again.epoch > others.epoch) == (2, True) or how == "hangs"
    assert again.num_tokens >= 2
    assert say(sharded, others, [9]) == [AppendOutcome.FENCED]
    assert say(sharded, again, [4]) == [AppendOutcome.OK]
    assert say(sharded, mine, [4]) == [AppendOutcome.OK]
    after = sessions.id.splitlines()
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_a_worker_begins_while_one_is_away(servers: tuple[ValkeyServer, ValkeyServer], sharded: Record) -> None:
    servers[1].kill()
    sessions = ShardedSession(sharded, "d2")
    claimed(sharded, sessions, LEFT[8])
    assert isinstance(claim_decode(sharded, RIGHT[8], sessions.id, "j1"), Busy)
    before = sessions.id
    servers[1].start()
    wait_for(lambda: not sharded.current_problem, "it answers")
    assert isinstance(claim_decode(sharded, RIGHT[8], before, "j1"), Busy)
    assert isinstance(claim_prefill(sharded, RIGHT[9], before, "b"), Busy)
    claimed(sharded, sessions, RIGHT[8])
    sessions.close()
