"""MirrorMaker 2 from the Maven jars, with the configuration of `docker/mirror`: it copies topics between Kafkas.

Needs what `sim.kafka_server` needs. The jars are kept in `~/.cache/penstock`, beside those of the broker.
"""

import os
from pathlib import Path
from typing import Self

from penstock.local.processes import Child, start_child
from sim.kafka_server import KAFKA_VERSION, build_java_command, fetch_jars, find_java

CONFIG = Path(__file__).parents[1] / "docker" / "mirror" / "eu-us.properties"
QUICK_COPIES = {
    # Tests do not wait for what takes a minute at home.
    "refresh.topics.interval.seconds": "1",
    "sync.topic.configs.interval.seconds": "1",
    "offset.flush.interval.ms": "200",
    "us.scheduled.rebalance.max.delay.ms": "0",
}
_MAIN = "org.apache.kafka.connect.mirror.MirrorMaker"


class MirrorMaker:
    """One MirrorMaker that copies from `eu` to `us`. It may be killed and started again."""

    def __init__(self, directory: Path, eu: str, us: str) -> None:
        self.directory = directory
        self._addresses = {"EU_KAFKA": eu, "US_KAFKA": us, "MIRROR_REPLICAS": "1"}
        self._child: Child | None = None

    @property
    def log(self) -> Path:
        """What it wrote."""
        return self.directory / "mirror.log"

    def start(self) -> Self:
        """Start it, without waiting for its first copy. Raises `DependencyMissing`."""
        java, jars = find_java(), fetch_jars("connect-mirror", f"kafka-{KAFKA_VERSION}-mirror")
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "mirror.properties"
        lines = [f"{name} = {value}\n" for name, value in QUICK_COPIES.items()]
        config.write_text(CONFIG.read_text("utf-8") + "".join(lines), "utf-8")
        command = build_java_command(java, jars, _MAIN, str(config), log_level="warn", options=["-Xmx256m"])
        environment = os.environ | self._addresses
        self._child = start_child(
            command, name="MirrorMaker", log=self.log, directory=self.directory, environment=environment
        )
        return self

    def kill(self) -> None:
        """Kill it, as a crash would."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
