"""The settings of topics, on a real Kafka: what was accepted is not deleted before it is read."""

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from penstock.bus.kafka.bus import KafkaBus, find_wrong_settings
from penstock.config.settings import BusSettings
from penstock.names import Pipeline
from tests.commands import Terminal

pytestmark = pytest.mark.timeout(120)

DAY_MS = 86_400_000


def change(bus: KafkaBus, topic: str, settings: dict[str, str]) -> None:
    """Set a topic's settings, as Kafka's own tools would."""
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin = AdminClient(bus.clients)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(15)


def test_doctor_says_how_to_mend_topics_that_may_lose_requests(
    kafka: str, redis_url: str, pipeline: Pipeline, terminal: Terminal
) -> None:
    bus = KafkaBus(pipeline, kafka, BusSettings())
    bus.create_topics()
    assert find_wrong_settings(bus) == {}
    servers = {"PENSTOCK_PIPELINE": pipeline.name, "PENSTOCK_KAFKA": kafka, "PENSTOCK_STREAM_URL": redis_url}
    topic, kept = pipeline.request_topic("batch"), pipeline.job_topic("batch")
    change(bus, topic, {"message.timestamp.type": "CreateTime", "retention.bytes": "1000000"})
    change(bus, kept, {"retention.ms": "-1", "max.message.bytes": "33554432"})
    said = terminal("doctor", **servers)
    assert f"fail  topic settings      {topic}: " in said.stdout
    assert "message.timestamp.type is CreateTime" in said.stdout
    assert kept not in said.stdout, "longer and larger is as good"
    (command,) = (line for line in said.stdout.splitlines() if "kafka-configs.sh" in line)
    assert f"--bootstrap-server {kafka} --alter --entity-type topics --entity-name {topic} " in command
    change(bus, topic, dict(pair.split("=") for pair in command.split("--add-config ")[1].split(",")))
    assert find_wrong_settings(bus) == {}
    assert "ok    topic settings" in terminal("doctor", **servers).stdout
