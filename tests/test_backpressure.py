"""How far prefill goes ahead of decode with batch work."""

from functools import partial

import pytest

from penstock.errors import BusUnavailable
from penstock.ops.lag import PipelineLag
from penstock.prefill_worker.backpressure import (
    MAX_QUEUED_MESSAGES,
    MAX_QUEUED_S,
    DecodeBackpressure,
    has_enough_queued,
)
from sim.waiting import wait_for
from tests.test_lag import heartbeat, lag_of

HELD = {"jobs": 8, "running": 8, "output_tokens": 300, "mean_output_tokens": 50.0}


def waiting(messages: int, rate: float | None = 500.0) -> PipelineLag:
    """So many batch messages that decode has to settle; it holds eight, and writes ten answers a second."""
    return lag_of([heartbeat("prefill", 1000.0), heartbeat("decode", rate, batch=HELD)], jobs_batch=messages)


def test_what_decode_holds_is_not_what_waits_for_it() -> None:
    assert waiting(8).queued_batch_s == 0.0
    assert waiting(28).queued_batch_s == 2.0
    assert not has_enough_queued(waiting(8 + int(10 * MAX_QUEUED_S)))
    assert has_enough_queued(waiting(9 + int(10 * MAX_QUEUED_S)))


def test_where_nothing_was_measured_messages_count() -> None:
    assert waiting(200, rate=None).queued_batch_s is None
    assert not has_enough_queued(waiting(MAX_QUEUED_MESSAGES, rate=None))
    assert has_enough_queued(waiting(MAX_QUEUED_MESSAGES + 1, rate=None))
    assert has_enough_queued(
        lag_of([heartbeat("prefill", 1000.0)], jobs_batch=MAX_QUEUED_MESSAGES + 1)
    )  # nobody decodes


def test_the_lag_is_read_when_batch_work_comes_and_until_decode_wants_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.prefill_worker.backpressure.POLL_INTERVAL_S", 0.01)
    num_messages: int | None = 1000
    num_reads = 0

    def read_lag() -> PipelineLag:
        nonlocal num_reads
        num_reads += 1
        if num_messages is None:
            raise BusUnavailable("away")
        return waiting(num_messages)

    with DecodeBackpressure(read_lag) as ahead:
        assert not ahead.is_active
        assert num_reads == 0
        ahead.note_batch_admitted()
        wait_for(lambda: ahead.is_active, "it was seen that decode has enough")
        num_messages = 8
        wait_for(lambda: not ahead.is_active, "it was seen that decode wants more")
        num_messages = 1000
        ahead.note_batch_admitted()
        wait_for(lambda: ahead.is_active, "it was seen again")
        num_messages = None
        wait_for(lambda: not ahead.is_active, "servers that are away hold up nothing")


def test_an_error_that_is_no_outage_does_not_hold_batch_work_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reading finds enough work, the next one a heartbeat that it does not understand, and so on."""
    monkeypatch.setattr("penstock.prefill_worker.backpressure.POLL_INTERVAL_S", 0.01)
    num_reads = 0

    def read_lag() -> PipelineLag:
        nonlocal num_reads
        num_reads += 1
        if num_reads % 2:
            return waiting(1000)
        raise KeyError("capacity")

    def has_looked(num_times: int) -> bool:
        return num_reads >= num_times

    with DecodeBackpressure(read_lag) as ahead:
        for num_errors in (1, 2):
            ahead.note_batch_admitted()
            wait_for(partial(has_looked, 2 * num_errors), "the error is met")
            wait_for(lambda: not ahead.is_active, "batch requests are admitted again")
