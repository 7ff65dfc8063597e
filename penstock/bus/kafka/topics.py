"""Topics that exist and whose settings break a promise. `KafkaBus.topic_settings` says what they have to be."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from penstock.bus.kafka.bus import KafkaBus
from penstock.bus.kafka.client import BROKER_TIMEOUT_S, bus_errors

MINIMUM_SETTINGS = ("max.message.bytes", "retention.ms", "min.insync.replicas")
"""Settings that may be larger than what a topic is made with; all others have to be equal."""
UNLIMITED = -1


def find_wrong_settings(bus: KafkaBus) -> dict[str, dict[str, str]]:
    """Of each of the pipeline's topics with settings that break a promise, these settings as they are now.

    Raises `BusUnavailable`, also where the user may not see the settings.
    """
    resources = {topic: ConfigResource(ResourceType.TOPIC, topic) for topic in bus.pipeline.all_topics()}
    found: dict[str, dict[str, str]] = {}
    admin = AdminClient(bus.clients)
    with bus_errors():
        asked: Mapping[ConfigResource, Future[Any]] = admin.describe_configs(
            list(resources.values()), request_timeout=BROKER_TIMEOUT_S
        )
        for topic, resource in resources.items():
            entries = asked[resource].result(BROKER_TIMEOUT_S)
            wanted = bus.topic_settings(topic)
            settings = {name: entries[name].value for name in wanted}
            wrong = {name: value for name, value in settings.items() if not _is_sufficient(name, value, wanted[name])}
            if wrong:
                found[topic] = wrong
    return found


def alter_command(bus: KafkaBus, topic: str, names: Mapping[str, str]) -> str:
    """The command of Kafka's own tools that gives these settings of a topic the values that it would be made with."""
    wanted = bus.topic_settings(topic)
    config = ",".join(f"{name}={wanted[name]}" for name in names)
    return (
        f"kafka-configs.sh --bootstrap-server {bus.bootstrap} --alter --entity-type topics "
        f"--entity-name {topic} --add-config {config}"
    )


def _is_sufficient(name: str, value: str, wanted: str) -> bool:
    if name in MINIMUM_SETTINGS:
        return int(value) == UNLIMITED or int(value) >= int(wanted)
    return value == wanted
