"""Asking brokers that have not agreed yet who leads a partition."""

from contextlib import suppress
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from penstock.bus.kafka import admin_lookups
from penstock.bus.kafka.admin_lookups import list_partitions, retry_during_election
from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.client import client_settings
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.names import Pipeline
from sim.waiting import wait_for


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
    assert retry_during_election(brokers.ask) == "an answer"


def test_another_error_is_told_at_once() -> None:
    brokers = Brokers(KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.NOT_LEADER_FOR_PARTITION)
    with pytest.raises(KafkaException):
        retry_during_election(brokers.ask)
    assert len(brokers.errors) == 1


def test_it_does_not_ask_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_lookups, "ELECTION_PATIENCE_S", 0.0)
    brokers = Brokers(*[KafkaError.NOT_LEADER_FOR_PARTITION] * 5)
    with pytest.raises(KafkaException):
        retry_during_election(brokers.ask)


def test_the_lag_asks_for_the_whole_cluster_but_once_in_a_while(
    kafka: str, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = KafkaBus(pipeline, kafka, BusSettings(partitions=2))
    bus.create_topics()

    listings, list_topics = list[int](), AdminClient.list_topics

    def note_and_list(*arguments: Any, **named: Any) -> Any:
        listings.append(1)
        return list_topics(*arguments, **named)

    monkeypatch.setattr(AdminClient, "list_topics", note_and_list)
    admin, topic = AdminClient(client_settings(kafka)), pipeline.request_topic("batch")
    assert list_partitions(admin, [topic, f"{topic}-no-such"]) == [(topic, 0), (topic, 1)]
    assert listings == []
    monkeypatch.setattr(admin_lookups, "OWN_TOPICS_REFRESH_S", float("inf"))
    unsettled: list[dict[str, int]] = []

    def is_answered() -> bool:
        with suppress(BusUnavailable):  # while a busy broker elects the coordinator of a group
            unsettled.append(bus.count_unsettled())
        return len(unsettled) > 2

    wait_for(is_answered, "the brokers know what is settled")
    assert set(unsettled[0]) == {
        *pipeline.input_topics("prefill").values(), *pipeline.input_topics("decode").values()
    }  # fmt: skip
    assert len(listings) == 1
