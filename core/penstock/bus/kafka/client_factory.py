"""Creates the clients of one pipeline's bus; tests replace them."""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer

from penstock.bus.beats import BeatReader
from penstock.bus.kafka.client import client_settings
from penstock.bus.kafka.position_lookup import FetchAttempts
from penstock.bus.kafka.writers import OutputWriter, Transactions
from penstock.bus.placement import WorkerBeat
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from penstock.pace import ServerPace

MAX_PLACED_WORKERS = 100
"""Among how many workers jobs are placed by heartbeats."""


class KafkaClientFactory:
    """Creates the clients that a member needs."""

    def __init__(
        self, pipeline: Pipeline, bootstrap: str, settings: BusSettings, access: Mapping[str, Any] | None = None
    ) -> None:
        """`access`: the settings with which clients log in, see `config.addresses.kafka_security_config`."""
        self.pipeline = pipeline
        self.bootstrap = bootstrap
        self.settings = settings
        self.redis_url = ""
        """Where heartbeats are, by which requests are placed, and notes of what is finished; empty: there are none."""
        self.clients = client_settings(bootstrap, access)
        """The settings that all clients of this bus share."""
        self.near = {"client.rack": settings.rack} if settings.rack else {}
        """Settings of consumers that read messages as they come, from the nearest copy. Those that read to the end of a
        topic do not have them: a copy learns a moment later than its leader what is there for readers."""
        self._beats: BeatReader | None = None
        self._num_workers = 0
        self.pace = ServerPace(settings.transaction_timeout_s)
        """How late brokers answer, as members and look-ups have seen it."""
        self.fetch_attempts = FetchAttempts()
        """Attempts of earlier members to fetch messages that take long, for the members that are made after them."""

    def create_consumer(self, settings: Mapping[str, Any]) -> Consumer:
        """Return a consumer with these settings and those that all clients share, which reads from the nearest copy."""
        return Consumer({**self.clients, **self.near, **settings})

    def create_transactions(self, transactional_id: str) -> Transactions:
        """Return a transactional writer of outputs. An older one of the same id is fenced."""
        return Transactions(self.clients, transactional_id, self.pace, self.read_beats)

    def create_output_writer(self) -> OutputWriter:
        """Return a writer of outputs without transactions."""
        return OutputWriter(self.clients, self.read_beats)

    def read_beats(self) -> list[WorkerBeat]:
        """Return the heartbeats by which workers place jobs, none without Redis. Raise `redis.RedisError`.

        Each worker would read those of all others once a second: beyond `MAX_PLACED_WORKERS` they are not read again,
        and jobs go by the hash of their ids.
        """
        if not self.redis_url or self._num_workers > MAX_PLACED_WORKERS:
            return []
        self._beats = self._beats or BeatReader(self.redis_url, self.pipeline)
        beats = self._beats.read_beats()
        self._num_workers = len(beats)
        return beats
