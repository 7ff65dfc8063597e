"""Asking brokers that have not agreed yet who leads a partition."""

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.bus import kafka_ask
from penstock.bus.kafka_ask import patiently


class Brokers:
    """Answer with errors first."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)

    def ask(self) -> str:
        """One question."""
        if self.errors:
            raise KafkaException(KafkaError(self.errors.pop(0)))
        return "an answer"


def test_while_leaders_are_agreed_on_it_asks_again() -> None:
    brokers = Brokers(KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_LEADER_EPOCH)
    assert patiently(brokers.ask) == "an answer"


def test_another_error_is_told_at_once() -> None:
    brokers = Brokers(KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.NOT_LEADER_FOR_PARTITION)
    with pytest.raises(KafkaException):
        patiently(brokers.ask)
    assert len(brokers.errors) == 1


def test_it_does_not_ask_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_ask, "PATIENCE_S", 0.0)
    brokers = Brokers(*[KafkaError.NOT_LEADER_FOR_PARTITION] * 5)
    with pytest.raises(KafkaException):
        patiently(brokers.ask)
