"""Chooses the bus by the settings."""

from penstock.bus.contract import Bus
from penstock.config.addresses import Addresses, kafka_security_config
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from penstock.sealing import use_tenant_keys


def connect_bus(addresses: Addresses, settings: BusSettings) -> Bus:
    """Return Kafka's bus if the settings have its address, else the bus on Redis Streams. Nothing is sent yet."""
    use_tenant_keys(addresses.tenant_keys)
    pipeline = Pipeline(addresses.pipeline)
    if addresses.kafka:
        from penstock.bus.kafka.bus import KafkaBus

        access = kafka_security_config(addresses)
        return KafkaBus(pipeline, addresses.kafka, settings, access, addresses.first_url)
    from penstock.bus.streams.bus import StreamsBus

    return StreamsBus(pipeline, addresses.first_url, settings)
