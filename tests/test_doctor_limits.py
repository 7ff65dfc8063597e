"""`penstock doctor` says which server it waited for, and does not wait longer than its limit."""

import threading
from collections.abc import Iterator

import pytest

from penstock.cli import doctor
from penstock.cli.doctor import Finding


def test_a_check_that_does_not_end_is_told_behind_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECK_LIMIT_S", 0.2)
    goes_on = threading.Event()

    def check(_: object) -> Iterator[Finding]:
        yield Finding("ok", "Kafka", "answers")
        goes_on.wait()

    for name in ("_check_stream_redis", "_check_kv_redis", "_check_workers"):
        monkeypatch.setattr(doctor, name, lambda _: iter(()))
    monkeypatch.setattr(doctor, "_check_bus", check)
    found = list(doctor.run_checks())
    goes_on.set()
    at = found.index(Finding("ok", "Kafka", "answers"))
    assert (found[at + 1].state, found[at + 1].subject) == ("fail", "bus")
    assert found[at + 1].detail == "no answer within 0.2 s"


def test_the_error_of_a_check_is_raised() -> None:
    def check() -> Iterator[Finding]:
        yield Finding("ok", "Kafka", "answers")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(doctor._run_within_limit("bus", check))
