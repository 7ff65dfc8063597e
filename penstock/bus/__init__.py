"""The bus: durable topics between the stages. `contract` says what it does; Kafka and Redis Streams do it."""

from penstock.bus.contract import Bus
from penstock.names import Pipeline
from penstock.settings import Addresses, BusSettings


def open_bus(addresses: Addresses, settings: BusSettings) -> Bus:
    """Kafka where an address is given, Redis Streams otherwise."""
    pipeline = Pipeline(addresses.pipeline)
    if addresses.kafka:
        from penstock.bus.kafka import KafkaBus

        return KafkaBus(pipeline, addresses.kafka, settings)
    from penstock.bus.streams import StreamsBus

    return StreamsBus(pipeline, addresses.stream_url, settings)
