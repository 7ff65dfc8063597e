"""Whatever a log or the live channel holds, a claim of other requests goes on, and readers raise typed errors."""

import json
from contextlib import suppress
from typing import Any

import pytest
import redis

from penstock.client.core import StreamReader
from penstock.config.settings import RecordSettings
from penstock.errors import StreamDiverged, StreamError
from penstock.messages import EndEvent, TokenEvent
from penstock.names import START_HASH, Pipeline
from penstock.record import Claim, Record, UnclaimedMessage
from penstock.record.log import TokenLog
from penstock.record.record import CLAIM
from sim.damage import Damage

NUM_DAMAGED = 20_000
TOKEN = TokenEvent.at_position(0, "ab12", 7, " a")
EVENTS = [json.loads(TOKEN.encode()), json.loads(EndEvent(finish_reason="stop").encode())]
GOOD_LOG = [[b"0-1", [b"e", TOKEN.encode()]]]
CLAIMED = [b"claimed", 5, 1, START_HASH.encode(), 0, 0, 1, 0, 1, 0]


def write_log(seed: int) -> list[Any]:
    """Return the entries of a log as the server sends them, one of them damaged."""
    damage = Damage(seed)
    entries = [
        damage.encode(event) if index == seed % 2 else json.dumps(event).encode() for index, event in enumerate(EVENTS)
    ]
    field = damage.random.choice([b"e", b"e", b"e", b"", b"\xff"])
    return [[b"%d-1" % index, [field, entry]] for index, entry in enumerate(entries)]


def test_a_damaged_log_is_its_own_request_s(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(redis.Redis(), pipeline, RecordSettings())  # never connected
    num_damaged = 0
    for seed in range(NUM_DAMAGED):
        rolled = Damage(seed).damage_bytes(START_HASH.encode()) if seed % 3 == 0 else START_HASH.encode()
        replies = [CLAIMED, GOOD_LOG, [*CLAIMED[:3], rolled, *CLAIMED[4:]], write_log(seed), CLAIMED, GOOD_LOG]
        monkeypatch.setattr(CLAIM, "run_once", lambda *_, replies=replies: replies)
        before, damaged, behind = record.claim_all(
            "decode", "s", [UnclaimedMessage(name, "", "j", b"") for name in "abc"]
        )
        for claim in (before, damaged, behind):
            assert isinstance(claim, Claim)
        assert before.log == behind.log == [TOKEN]  # type: ignore[union-attr]
        num_damaged += bool(damaged.damage)  # type: ignore[union-attr]
    assert num_damaged > NUM_DAMAGED / 2


def test_readers_raise_typed_errors(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[Any] = []
    monkeypatch.setattr("penstock.record.log.execute_all", lambda *_: [entries])
    log = TokenLog(redis.Redis(), pipeline, RecordSettings())  # never connected
    for seed in range(NUM_DAMAGED):
        entries[:] = write_log(seed)
        with suppress(StreamError):
            StreamReader().feed_log(log.read_events("a"))
        with suppress(StreamDiverged):  # what is no event of the channel is looked for in the log
            StreamReader().feed_payload(Damage(seed).encode(EVENTS[seed % 2]))
