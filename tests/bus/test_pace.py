"""Time limits of brokers follow from how late they answer."""

from contextlib import suppress

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock import pace as pace_module
from penstock.pace import ServerPace
from sim.world.kafka_broker import make_failure


class Clock:
    """The time of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(pace_module, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def ask(self, pace: ServerPace, answer_s: float, pause_s: float = 0.0) -> float:
        """Ask a question that would be answered after a time, and return its limit."""
        with suppress(KafkaException), pace.ask(2.0) as limit_s:
            self.now_s += min(answer_s, limit_s)
            if answer_s > limit_s:
                raise make_failure(KafkaError._TIMED_OUT)
        self.now_s += pause_s
        return limit_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize(
    ("answer_s", "slowness"), [(0.2, 1), (0.4, 2), (0.5, 2), (1.0, 4), (2.0, 8), (3.0, 16), (9.0, 16)]
)
def test_three_late_answers_in_a_row_make_limits_longer_at_once_and_a_quick_minute_shorter(
    clock: Clock, answer_s: float, slowness: int
) -> None:
    pace, seen = ServerPace(5.0), list[int]()
    assert not ServerPace(5.0).is_steady, "nobody was asked"
    while len(seen) < 5:  # with unanswered questions among them, if the first limits are too short
        before = pace._heard_s
        clock.ask(pace, answer_s)
        if pace._heard_s != before:
            seen.append(pace.slowness)
    assert seen == [1, 1, slowness, slowness, slowness]
    assert pace.is_steady
    assert pace.stretch(3.0) == 3.0 * slowness
    assert pace.transaction_timeout_s == 5.0 * slowness >= 20 * min(answer_s, 4.0)
    num_changes = 0
    for _ in range(200):
        before_s, was = clock.now_s, pace.slowness
        clock.ask(pace, 0.01, pause_s=2.0)
        num_changes += pace.slowness != was
        assert pace.slowness in (was, was // 2)
        assert pace.slowness == was or before_s > 1000.0 + pace_module.QUICK_S
    assert pace.slowness == 1
    assert 2**num_changes == slowness, "one new producer for each halving"


def test_one_late_answer_of_a_busy_machine_changes_nothing(clock: Clock) -> None:
    pace = ServerPace(5.0)
    for number in range(100):
        clock.ask(pace, 3.0 if number % 3 == 0 else 0.01, pause_s=1.0)
    assert pace.slowness == 1


def test_limits_of_questions_grow_while_none_is_answered_and_brokers_are_away_after_some_seconds(clock: Clock) -> None:
    pace = ServerPace(5.0)
    clock.ask(pace, 0.01, pause_s=60.0)
    assert pace.describe_silence() == "", "nobody has asked since"
    assert [clock.ask(pace, 100.0) for _ in range(2)] == [2.0, 4.0]
    assert "no broker has answered for 66 s" in pace.describe_silence()
    assert [clock.ask(pace, 100.0) for _ in range(3)] == [8.0, 15.0, 15.0]
    assert clock.ask(pace, 3.0) == 15.0
    assert (pace.describe_silence(), pace.slowness, clock.ask(pace, 0.01)) == ("", 1, 2.0)


def test_a_transaction_that_fails_by_its_limits_gets_others_unless_brokers_are_away(clock: Clock) -> None:
    pace = ServerPace(30.0)
    begun_s = clock.now_s
    assert not pace.note_too_short(1, begun_s), "they have answered nothing meanwhile"
    clock.ask(pace, 0.01)
    assert [(pace.note_too_short(1, begun_s), pace.slowness) for _ in range(2)] == [(True, 2), (True, 2)]
    assert pace.transaction_timeout_s == 30.0, "never shorter than the setting"
    assert [pace.note_too_short(slowness, begun_s) for slowness in (2, 4)] == [True, False], "questions have answers"
    for _ in range(3):
        clock.ask(pace, 0.8)
    assert (pace.slowness, pace.note_too_short(4, begun_s), pace.slowness) == (4, True, 8)
