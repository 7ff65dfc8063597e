"""Requests on two servers: each keeps its own, and one that is away is an outage of its requests alone."""

from collections.abc import Iterator
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
    Sessions,
    UnclaimedMessage,
    connect_servers,
    open_record,
)
from penstock.redis.servers import choose_server
from sim.waiting import wait_for
from tests.pipeline.site import hanging
from tests.record.play import end, say

NAMES = ("left", "right")
IDS = [f"r{number}" for number in range(40)]
LEFT, RIGHT = ([one for one in IDS if choose_server(NAMES, one) == index] for index in range(2))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ValkeyServer, ValkeyServer]]:
    directory: Path = tmp_path_factory.mktemp("servers")
    with ValkeyServer(directory / "left") as left, ValkeyServer(directory / "right") as right:
        yield left, right


@pytest.fixture
def spread(servers: tuple[ValkeyServer, ValkeyServer], pipeline: Pipeline) -> Iterator[Record]:
    urls = ",".join(f"{server.url}#{name}" for server, name in zip(servers, NAMES, strict=True))
    record = open_record(connect_servers(urls), pipeline, RecordSettings(lease_s=0.3))
    yield record
    record.close()


@pytest.fixture
def sessions(spread: Record) -> Iterator[Sessions]:
    made = Sessions(spread, "decode", "d1")
    yield made
    made.close()


def claimed(record: Record, sessions: Sessions, request_id: str) -> Claim:
    claim = record.claim_decode(request_id, sessions.id, "j1", b"message")
    assert isinstance(claim, Claim), claim
    sessions.add_claim(claim)
    return claim


def test_a_request_is_on_the_server_of_its_id(
    servers: tuple[ValkeyServer, ValkeyServer], spread: Record, sessions: Sessions, pipeline: Pipeline
) -> None:
    claims = [claimed(spread, sessions, name) for name in (LEFT[0], RIGHT[0], LEFT[1], RIGHT[1])]
    events = [(claim, claim.next_event(number, "x")) for number, claim in enumerate(claims)]
    assert spread.append_tokens(events) == [AppendOutcome.OK] * 4
    assert spread.finish_all([(claim, end()) for claim in claims]) == [AppendOutcome.OK] * 4
    for (claim, event), name in zip(events, (0, 1, 0, 1), strict=True):
        assert spread.read_log(claim.id)[0] == event
        assert isinstance(spread.read_log(claim.id)[1], EndEvent)
        for index, server in enumerate(servers):
            alone = open_record(connect_servers(server.url), pipeline, spread.settings)
            assert (alone.read_status(claim.id) is not None) == (index == name)
            alone.close()


def test_what_is_free_is_taken_from_all(spread: Record, sessions: Sessions) -> None:
    waiting = [UnclaimedMessage(name, "", "j1", b"message") for name in LEFT[2:5] + RIGHT[2:5]]
    assert spread.put_down("decode", waiting) == []
    assert spread.count_free("decode") == 6
    wait_for(lambda: sessions.num_free == 6, "the sessions hear of them")
    taken = spread.take_over_free("decode", sessions.id, 4)
    sessions.num_free -= 4
    # A renewal between the two lines above has counted what was taken already, and the next one counts anew.
    wait_for(lambda: sessions.num_free == 2, "the sessions hear of what is left")
    taken += spread.take_over_free("decode", sessions.id, 9)
    assert sorted(one.claim.id for one in taken) == sorted(one.id for one in waiting)


@pytest.mark.parametrize("how", ["hangs", "killed"])
def test_one_that_is_away_is_an_outage_of_its_own_requests(
    servers: tuple[ValkeyServer, ValkeyServer], spread: Record, sessions: Sessions, how: str
) -> None:
    """Its tokens are refused and its claims lost, and nothing is raised; all else goes on. When it answers its requests
    are claimed again, with all their tokens.
    """
    mine, others = claimed(spread, sessions, LEFT[6]), claimed(spread, sessions, RIGHT[6])
    assert say(spread, mine, [1, 2]) + say(spread, others, [1, 2]) == [AppendOutcome.OK] * 4
    server = servers[1]
    before = sessions.id.splitlines()

    def use_both() -> None:
        events = [(claim, claim.next_event(3, "x")) for claim in (others, mine)]
        assert spread.append_tokens(events) == [AppendOutcome.FENCED, AppendOutcome.OK]
        assert "right" in spread.current_problem
        assert (others, ClaimEvent.LOST) in sessions.collect_events()
        assert sessions.collect_events() == []
        assert isinstance(spread.claim_decode(RIGHT[6], sessions.id, "j1"), Busy)
        assert not spread.release_claim(others)
        assert spread.finish_all([(others, end())]) == [AppendOutcome.FENCED]
        kept = [UnclaimedMessage(name, "", "j1", b"message") for name in (LEFT[7], RIGHT[7])]
        assert spread.put_down("decode", kept) == kept[1:]
        assert [one.claim.id for one in spread.take_over_free("decode", sessions.id, 9)] == [LEFT[7]]

    if how == "hangs":
        with hanging(server.pid):
            use_both()
    else:
        server.kill()
        use_both()
        server.start()
    wait_for(lambda: not spread.current_problem, "it answers again")
    again = claimed(spread, sessions, RIGHT[6])
    assert (again.num_tokens, again.epoch > others.epoch) == (2, True) or how == "hangs"
    assert again.num_tokens >= 2
    assert say(spread, others, [9]) == [AppendOutcome.FENCED]
    assert say(spread, again, [4]) == [AppendOutcome.OK]
    assert say(spread, mine, [4]) == [AppendOutcome.OK]
    after = sessions.id.splitlines()
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_a_worker_begins_while_one_is_away(servers: tuple[ValkeyServer, ValkeyServer], spread: Record) -> None:
    servers[1].kill()
    sessions = Sessions(spread, "decode", "d2")
    claimed(spread, sessions, LEFT[8])
    assert isinstance(spread.claim_decode(RIGHT[8], sessions.id, "j1"), Busy)
    before = sessions.id
    servers[1].start()
    wait_for(lambda: not spread.current_problem, "it answers")
    assert isinstance(spread.claim_decode(RIGHT[8], before, "j1"), Busy)
    assert isinstance(spread.claim_prefill(RIGHT[9], before, "b"), Busy)
    claimed(spread, sessions, RIGHT[8])
    sessions.close()
