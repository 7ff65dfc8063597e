"""MirrorMaker 2 from the Maven jars, with the configuration of `docker/mirror`: it copies topics between Kafkas.

Needs what `sim.kafka_server` needs. The jars are kept in `~/.cache/penstock`, beside those of the broker.
"""

import os
from pathlib import Path
from typing import Self

from penstock.local.processes import Child, find_free_port, start_child
from sim.chaos.proxy import Proxy
from sim.kafka_server import KAFKA_VERSION, KafkaServer, Quorum, build_java_command, fetch_jars, find_java

CONFIG = Path(__file__).parents[1] / "docker" / "mirror" / "eu-us.properties"
QUICK_COPIES = {
    # Tests do not wait for what takes a minute at home.
    "refresh.topics.interval.seconds": "1",
    "sync.topic.configs.interval.seconds": "1",
    "offset.flush.interval.ms": "200",
    "us.scheduled.rebalance.max.delay.ms": "0",
}
SMALL_HEAP = ("-Xmx256m",)
LONG_SESSION = {"broker.session.timeout.ms": "120000"}
"""A broker may stand still for so long and is not fenced: see `LONE_BROKER_SETTINGS`."""
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

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not killed."""
        return self._child is not None and self._child.is_alive()

    def kill(self) -> None:
        """Kill it, as a crash would."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


class MirroredKafkas:
    """The Kafkas of `eu` and `us`, and a MirrorMaker in `us`, which reaches that of `eu` through a relay."""

    def __init__(self, directory: Path, delay_s: float = 0.0) -> None:
        """`delay_s`: how long all is under way from one region to the other."""
        self.relay = Proxy(find_free_port())
        self.relay.delay_both_ways(delay_s)
        own, quorum = find_free_port(), Quorum.create_new(1)
        near, far = f"PLAINTEXT://127.0.0.1:{own}", "FAR://127.0.0.1:"
        self.eu = KafkaServer(
            directory / "eu", own, quorum=quorum, jvm_options=SMALL_HEAP,
            more=LONG_SESSION | {
                "listeners": f"{near},{far}{self.relay.target_port},CONTROLLER://127.0.0.1:{quorum.ports[1]}",
                "advertised.listeners": f"{near},{far}{self.relay.port}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,FAR:PLAINTEXT,CONTROLLER:PLAINTEXT",
            },
        )  # fmt: skip
        self.us = KafkaServer(directory / "us", jvm_options=SMALL_HEAP)
        self.mirror = MirrorMaker(directory / "mirror", f"127.0.0.1:{self.relay.port}", self.us.bootstrap)

    def __enter__(self) -> Self:
        try:
            self.relay.__enter__()
            self.eu.start()
            self.us.start()
            self.mirror.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.mirror.kill()
        self.eu.stop()
        self.us.stop()
        self.relay.__exit__()
