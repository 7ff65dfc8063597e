"""The clients of one pipeline's bus."""

from collections.abc import Mapping
from typing import Any

from confluent_kafka import Consumer

from penstock.bus.kafka.client import client_settings
from penstock.bus.kafka.outputs import OutputWriter
from penstock.bus.kafka.transactions import Transactions
from penstock.config.settings import BusSettings
from penstock.names import Pipeline


class KafkaClientFactory:
    """Makes the clients that a pipeline's members are made of."""

    def __init__(
        self, pipeline: Pipeline, bootstrap: str, settings: BusSettings, access: Mapping[str, str] | None = None
    ) -> None:
        """`access`: what the brokers ask clients for, see `config.addresses.kafka_security_config`."""
        self.pipeline = pipeline
        self.bootstrap = bootstrap
        self.settings = settings
        self.clients = client_settings(bootstrap, access)
        """What all clients of this bus share."""

    def create_consumer(self, settings: Mapping[str, Any]) -> Consumer:
        """Return a consumer of a member, with these settings beside what all clients share."""
        return Consumer({**self.clients, **settings})

    def create_transactions(self, transactional_id: str) -> Transactions:
        """Return what a member settles with; an older one of the same id is fenced."""
        return Transactions(self.clients, transactional_id, self.settings.transaction_timeout_s)

    def create_output_writer(self) -> OutputWriter:
        """Return what a member writes with that settles without transactions."""
        return OutputWriter(self.clients)
