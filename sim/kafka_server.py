"""Real Apache Kafka brokers (KRaft, each also a controller) from the Maven jars, for development and tests.

Needs Java 17 or newer, and Maven once to fetch the jars; they are kept in `~/.cache/penstock`.
`python -m sim.kafka_server COMMAND …` runs a command with the address of a broker in `PENSTOCK_KAFKA`, as
`make demo-kafka` does.
"""

import base64
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from penstock.errors import DependencyMissing, PenstockError
from penstock.local.processes import Child, find_free_port, start_child, wait_until_serving
from penstock.messages import MAX_REQUEST_BYTES
from penstock.waiting import wait_until

KAFKA_VERSION = "4.3.1"
KAFKA_IMAGE = f"apache/kafka:{KAFKA_VERSION}"
MIN_JAVA_VERSION = 17
_MISSING_ADVICE = f"no Kafka: set PENSTOCK_KAFKA, or run Docker, or install Java {MIN_JAVA_VERSION}+ and Maven"

_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>penstock</groupId><artifactId>kafka-jars</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>{artifact}</artifactId><version>{version}</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
"""

SHORT_TIMEOUTS = {
    # A dead member is noticed after three seconds instead of 45.
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "3000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "300",
}
"""Timeouts of consumer groups for development. Without them the broker has its defaults."""

QUICK_RESTART = {
    "broker.heartbeat.interval.ms": "500",
    "broker.session.timeout.ms": "3000",
}
"""A broker of several that was killed comes back after 5 seconds instead of 13: the controllers wait for the session to
end. Only for brokers that are never stopped with SIGSTOP: one that is fenced while a transaction ends may skip its
markers.
"""

LONE_BROKER_SETTINGS = {"broker.session.timeout.ms": "30000"}
"""A broker without others is not fenced by its own controller if it stands still for less than this. Nobody could lead
its partitions instead, and transactions that end in that moment may lose their markers.
"""
START_LIMIT_S = 300.0
"""It ends hangs only: a server that lives begins to answer, on a slow machine late."""
MAX_WRITES_UNTIL_FENCED = 10
"""A controller ends the session of a broker's last life, if it had not ended before, within a second of its own time.
It writes twice a second, so after so many writes there was none.
"""
_FENCING_SETTINGS = {
    "process.roles": "controller",
    "broker.heartbeat.interval.ms": "100",
    "broker.session.timeout.ms": "500",
}
_FENCING_LOGGER = "org.apache.kafka.controller.ReplicationControlManager"

BROKER_SETTINGS = {
    "message.max.bytes": str(2 * MAX_REQUEST_BYTES + 2**20),
    "replica.fetch.max.bytes": str(2 * MAX_REQUEST_BYTES + 2**20),
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    # One node: one replica of everything, and few internal partitions.
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "log.cleaner.dedupe.buffer.size": "2097152",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "controlled.shutdown.enable": "false",
}
"""The settings of the broker from the jars and of the one in a container."""

_JVM_OPTIONS = ("-Xms64m", "-Xmx320m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")


@dataclass(frozen=True)
class Quorum:
    """The controllers of a cluster. Each broker is also a controller."""

    cluster_id: str
    ports: Mapping[int, int]
    """The port of each controller, by the number of its node."""
    directory_ids: Mapping[int, str]
    """The id of each node's data directory in the quorum."""

    @classmethod
    def create_new(cls, num_nodes: int) -> Self:
        """Return the quorum of a new cluster. Its nodes are numbered from 1."""
        nodes = range(1, num_nodes + 1)
        return cls(_random_id(), {node: find_free_port() for node in nodes}, {node: _random_id() for node in nodes})

    def broker_settings(self) -> dict[str, str]:
        """Return the settings of all brokers of the cluster. Of three brokers one may be lost."""
        addresses = [f"127.0.0.1:{port}" for port in self.ports.values()]
        copies = min(3, len(self.ports))
        return {
            "controller.quorum.bootstrap.servers": ",".join(addresses),
            "offsets.topic.replication.factor": str(copies),
            "transaction.state.log.replication.factor": str(copies),
            "transaction.state.log.min.isr": str(copies // 2 + 1),
            "min.insync.replicas": str(copies // 2 + 1),
            # A broker that is stopped hands its partitions over, where there is another.
            "controlled.shutdown.enable": "true" if copies > 1 else "false",
        }

    def format_voters(self) -> str:
        """Return the controllers in the form that the tool for formatting a directory expects."""
        return ",".join(f"{node}@127.0.0.1:{port}:{self.directory_ids[node]}" for node, port in self.ports.items())


def _random_id() -> str:
    """Return a UUID as Kafka writes it. The zero byte in front keeps it from beginning with a hyphen."""
    return base64.urlsafe_b64encode(b"\0" + os.urandom(15)).decode().rstrip("=")


class KafkaServer:
    """One broker with its data in `directory`, which it finds again when it is restarted.

    It advertises the port `advertised` to clients, by default its own. `timeouts` are those of consumer groups. Without
    a `quorum` it is a cluster of its own. `jvm_options` are for the Java that runs it.
    """

    def __init__(
        self,
        directory: Path,
        port: int | None = None,
        *,
        advertised: int | None = None,
        timeouts: Mapping[str, str] = SHORT_TIMEOUTS,
        node: int = 1,
        quorum: Quorum | None = None,
        jvm_options: Sequence[str] = (),
        more: Mapping[str, str] | None = None,
    ) -> None:
        """`more`: settings that hold before all others."""
        self.directory = directory
        self.port = port or find_free_port()
        self.node = node
        self._advertised, self._timeouts, self._jvm_options = advertised or self.port, timeouts, jvm_options
        self._quorum, self._more = quorum or Quorum.create_new(1), more or {}
        self._child: Child | None = None

    @property
    def bootstrap(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id while the broker runs."""
        return self._child.pid if self._child else None

    def start(self) -> Self:
        """Format the storage if it is new, start, and wait until the broker answers. Raises `DependencyMissing`."""
        self.start_process()
        self.wait_until_serving()
        return self

    def start_process(self) -> None:
        """Start without waiting: a node of several answers only once most of them run. Raises `DependencyMissing`."""
        if self._child is not None and self._child.is_alive():
            return
        java, jars = find_java(), find_jars()
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "server.properties"
        if not config.exists():
            _write_settings(config, self._build_settings())
            self._format_storage(java, jars, config)
        elif self._is_alone:
            self._end_last_session(java, jars)
        log = self.directory / "kafka.log"
        options = self._jvm_options
        command = build_java_command(java, jars, "kafka.Kafka", str(config), log_level="warn", options=options)
        self._child = start_child(command, name="Kafka", log=log, directory=self.directory)

    def wait_until_serving(self) -> None:
        """Wait until the broker answers clients. Raises `DependencyMissing`."""
        assert self._child is not None, "it was launched"
        wait_until_serving(self._child, lambda: is_serving(self.bootstrap), START_LIMIT_S)

    def stop(self) -> None:
        """Stop the broker in an orderly way."""
        if self._child is not None:
            self._child.stop(20.0)
            self._child = None

    def kill(self) -> None:
        """Kill the broker, as a crash would."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    @property
    def _is_alone(self) -> bool:
        return len(self._quorum.ports) == 1

    def _end_last_session(self, java: str, jars: Path) -> None:
        """Have a controller by itself end the session of this broker's last life, and with it the lead of partitions.

        Otherwise the broker would take itself for the leader of everything from its last life until that session ends,
        and go on with transactions that were being ended: before it serves anybody, so that their markers cannot be
        written. When the session ends, Kafka 4.3 takes their partitions for deleted, and notes the transactions as
        ended without markers. What readers of committed messages have not read then stays hidden from them.
        """
        config, log = self.directory / "fencing.properties", self.directory / "fencing.log"
        settings = self._build_settings() | _FENCING_SETTINGS | {"listeners": self._controller_listener}
        del settings["advertised.listeners"]
        _write_settings(config, settings)
        log.unlink(missing_ok=True)
        options = (f"-Dorg.slf4j.simpleLogger.log.{_FENCING_LOGGER}=info",)
        command = build_java_command(java, jars, "kafka.Kafka", str(config), log_level="warn", options=options)
        controller = start_child(command, name="Kafka's controller", log=log, directory=self.directory)

        def has_fenced() -> bool:
            return "Fencing broker" in log.read_text(errors="replace") or not controller.is_alive()

        def await_write() -> None:
            written = self._measure_metadata_log()
            more = partial(self._has_written_more, written)
            wait_until(
                lambda: more() or not controller.is_alive(), START_LIMIT_S, "the controller writes", every_s=0.02
            )

        try:
            with contextlib.suppress(TimeoutError):  # then the broker starts all the same
                for _ in range(MAX_WRITES_UNTIL_FENCED):
                    if has_fenced():
                        break
                    await_write()
                # It says so before it writes it, all in order, and what it writes first may have been under way before.
                for _ in range(2):
                    await_write()
        finally:
            controller.kill()

    def _has_written_more(self, num_bytes: int) -> bool:
        return self._measure_metadata_log() > num_bytes

    def _measure_metadata_log(self) -> int:
        """Return the bytes in the log of the cluster's metadata."""
        return sum(part.stat().st_size for part in self.directory.glob("data/__cluster_metadata-0/*.log"))

    @property
    def _controller_listener(self) -> str:
        return f"CONTROLLER://127.0.0.1:{self._quorum.ports[self.node]}"

    def _build_settings(self) -> dict[str, str]:
        return (
            BROKER_SETTINGS
            | self._quorum.broker_settings()
            | (LONE_BROKER_SETTINGS if self._is_alone else {})
            | dict(self._timeouts)
            | {
                "process.roles": "broker,controller",
                "node.id": str(self.node),
                "controller.listener.names": "CONTROLLER",
                "listeners": f"PLAINTEXT://127.0.0.1:{self.port},{self._controller_listener}",
                "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self._advertised}",
                "log.dirs": str(self.directory / "data"),
            }
            | dict(self._more)
        )

    def _format_storage(self, java: str, jars: Path, config: Path) -> None:
        cluster, voters = self._quorum.cluster_id, self._quorum.format_voters()
        wanted = ("format", "--initial-controllers", voters, "-t", cluster, "-c", str(config))
        _run_command(build_java_command(java, jars, "kafka.tools.StorageTool", *wanted, log_level="off"))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class KafkaCluster:
    """Several brokers that replicate each other, with their data below `directory`."""

    def __init__(self, directory: Path, num_brokers: int = 3, *, timeouts: Mapping[str, str] = SHORT_TIMEOUTS) -> None:
        quorum = Quorum.create_new(num_brokers)
        self.servers = {
            node: KafkaServer(directory / f"broker-{node}", timeouts=timeouts, node=node, quorum=quorum)
            for node in quorum.ports
        }
        """The brokers, by the number of their node."""

    @property
    def bootstrap(self) -> str:
        """The addresses of all brokers."""
        return ",".join(server.bootstrap for server in self.servers.values())

    def start(self) -> Self:
        """Start all brokers, and wait until each is in the cluster. Raises `DependencyMissing`."""
        with ThreadPoolExecutor(len(self.servers)) as pool:
            for launched in [pool.submit(server.start_process) for server in self.servers.values()]:
                launched.result()
        for server in self.servers.values():
            server.wait_until_serving()
        wait_until(
            lambda: is_serving(self.bootstrap, num_brokers=len(self.servers)), START_LIMIT_S, "all brokers are known"
        )
        return self

    def stop(self) -> None:
        """Kill all brokers, as a crash would: an orderly stop would hand partitions over to brokers that stop too."""
        for server in self.servers.values():
            server.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def is_serving(bootstrap: str, timeout_s: float = 1.0, num_brokers: int = 1) -> bool:
    """Return whether a broker answers there and knows at least `num_brokers` brokers."""
    try:
        admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0, "socket.timeout.ms": 2000})
        return len(admin.list_topics(timeout=timeout_s).brokers) >= num_brokers
    except KafkaException:
        return False


def find_java() -> str:
    """Return the path of a Java of at least version 17. Raises `DependencyMissing`."""
    home = os.environ.get("JAVA_HOME", "")
    for candidate in (f"{home}/bin/java" if home else "", shutil.which("java") or ""):
        if candidate and Path(candidate).exists():
            version = subprocess.run([candidate, "-version"], capture_output=True, text=True, check=False).stderr
            match = re.search(r'version "(\d+)', version)
            if match and int(match[1]) >= MIN_JAVA_VERSION:
                return candidate
    raise DependencyMissing(_MISSING_ADVICE)


def find_jars() -> Path:
    """Return the folder of the broker's jars, which Maven fetches the first time. Raises `DependencyMissing`."""
    return fetch_jars("kafka_2.13", f"kafka-{KAFKA_VERSION}", archive_classes)


def fetch_jars(artifact: str, folder: str, prepare: Callable[[Path, Path], None] = lambda *_: None) -> Path:
    """Return the folder with an artifact of Kafka and all that it needs, which Maven fetches the first time.

    `prepare` gets the new folder, and another for its scratch. Raises `DependencyMissing`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    jars = cache / folder
    if jars.is_dir():
        return jars
    maven = shutil.which("mvn")
    if maven is None:
        raise DependencyMissing(_MISSING_ADVICE)
    sys.stderr.write(f"penstock: fetching Apache Kafka {KAFKA_VERSION} through Maven (44 MB, once) ...\n")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        Path(scratch, "pom.xml").write_text(_POM.format(artifact=artifact, version=KAFKA_VERSION), "utf-8")
        out = Path(scratch, "jars")
        goal = ["-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={out}"]
        _run_command([maven, *goal, "-f", f"{scratch}/pom.xml"], timeout_s=900)
        # Another process may have created the folder meanwhile, with the same jars.
        with contextlib.suppress(OSError):
            out.rename(jars)
        prepare(jars, Path(scratch))
    return jars


def archive_classes(jars: Path, scratch: Path) -> None:
    """Keep the classes that a broker loads in the form that Java maps: it starts in half the processor time.

    Java of another version does not use the archive. Where none can be made, brokers start without.
    """
    made = scratch / "classes.jsa"
    with contextlib.suppress(DependencyMissing, FileNotFoundError):
        with KafkaServer(scratch / "broker", jvm_options=[f"-XX:ArchiveClassesAtExit={made}"]):
            pass  # it is written when the broker has stopped
        made.replace(_find_archive(jars))


def _find_archive(jars: Path) -> Path:
    """Return where the archive of classes of these jars lies, or will lie."""
    return jars.with_name(f"{jars.name}.jsa")


def _write_settings(path: Path, settings: Mapping[str, str]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()), "utf-8", "surrogateescape")


def _run_command(command: list[str], timeout_s: float = 120) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise DependencyMissing(f"no Kafka: {command[0]} did not end within {timeout_s:g} s") from None
    if done.returncode != 0:
        raise DependencyMissing(f"no Kafka: {command[0]} failed: {(done.stdout + done.stderr).strip()[-1500:]}")
    return done.stdout


def build_java_command(
    java: str, jars: Path, main: str, *arguments: str, log_level: str, options: Sequence[str] = ()
) -> list[str]:
    """Return the command that runs a class of the jars."""
    archive = _find_archive(jars)
    archived = [f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []
    logging = ("-Dorg.slf4j.simpleLogger.showDateTime=true", f"-Dorg.slf4j.simpleLogger.defaultLogLevel={log_level}")
    return [java, *_JVM_OPTIONS, *archived, *logging, *options, "-cp", f"{jars}/*", main, *arguments]


def is_container_engine_running() -> bool:
    """Return whether containers can be started here: `testcontainers` is installed and an engine answers a ping."""
    if find_spec("testcontainers") is None:
        return False
    docker: Any = import_module("docker")  # not the folder of that name
    with contextlib.suppress(docker.errors.DockerException), contextlib.closing(docker.from_env(timeout=2)) as client:
        return bool(client.ping())
    return False


@contextlib.contextmanager
def find_or_start_kafka(directory: Path) -> Iterator[str]:
    """Yield a Kafka's address: that of `PENSTOCK_KAFKA`, else of a container, else of a `KafkaServer`.

    Raises `DependencyMissing` with one line that says what to install.
    """
    if given := os.environ.get("PENSTOCK_KAFKA", ""):
        yield given
    elif is_container_engine_running():
        with _start_container() as bootstrap:
            yield bootstrap
    else:
        with KafkaServer(directory) as server:
            yield server.bootstrap


@contextlib.contextmanager
def _start_container() -> Iterator[str]:
    from testcontainers.core.container import DockerContainer

    port = find_free_port()
    settings = (
        BROKER_SETTINGS
        | SHORT_TIMEOUTS
        | {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": "1@localhost:9093",
            "controller.listener.names": "CONTROLLER",
            "listeners": "PLAINTEXT://:9092,CONTROLLER://:9093",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }
    )
    container = DockerContainer(KAFKA_IMAGE)
    container.ports["9092/tcp"] = ("127.0.0.1", port)  # type: ignore[assignment]
    for name, value in settings.items():
        container.with_env(f"KAFKA_{name.upper().replace('.', '_')}", value)
    with container:
        bootstrap = f"127.0.0.1:{port}"
        wait_until(lambda: is_serving(bootstrap), 90.0, "the Kafka container answers")
        yield bootstrap


def main() -> int:
    """Run the command of the arguments with a broker, and return its exit code."""
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-kafka-") as name:
            sys.stderr.write("starting Kafka\n")
            with find_or_start_kafka(Path(name)) as address:
                environment = os.environ | {"PENSTOCK_KAFKA": address}
                return subprocess.run(sys.argv[1:], env=environment, check=False).returncode
    except PenstockError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
