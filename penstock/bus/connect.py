"""Which bus the settings ask for."""

from penstock.bus.contract import Bus
from penstock.config.addresses import Addresses, kafka_security_config
from penstock.config.settings import BusSettings
from penstock.names import Pipeline


def connect_bus(addresses: Addresses, settings: BusSettings) -> Bus:
    """Kafka where an address is given, else Redis Streams on the stream server. Nothing is sent yet."""
    pipeline = Pipeline(addresses.pipeline)
    if addresses.kafka:
        from penstock.bus.kafka.bus import KafkaBus

        return KafkaBus(pipeline, addresses.kafka, settings, kafka_security_config(addresses))
    from penstock.bus.streams.bus import StreamsBus

    return StreamsBus(pipeline, addresses.first_url, settings)
