"""Replicated servers, three brokers and a Redis with a replica under Sentinel, whose leaders are killed."""

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from confluent_kafka.admin import AdminClient

from sim.chaos.system import Servers
from sim.kafka_server import KafkaCluster, KafkaServer
from sim.redis_servers import ReplicatedValkey
from sim.waiting import PATIENCE_S, wait_for


class ReplicatedServers(Servers):
    """Replicated servers. Workers reach them without proxies, as Sentinel and brokers tell clients where to connect."""

    is_replicated = True

    def __init__(self, directory: Path, timeouts: Mapping[str, str]) -> None:
        self.replicated = ReplicatedValkey(directory / "redis")
        self.cluster = KafkaCluster(directory / "kafka", timeouts=timeouts)
        self.redis = next(iter(self.replicated.servers.values()))
        self.kafka, self.kafka_proxy = None, None
        self.bootstrap = self.cluster.bootstrap

    @property
    def stream_url(self) -> str:
        """The URL of the stream Redis."""
        return self.replicated.url

    def fail_over(self, whose: str, down_s: float) -> None:
        """Kill the leading server and start it again after `down_s`, as a replica of the new leader."""
        if whose == "kafka":
            leader = self._leading_broker()
            leader.kill()
            time.sleep(down_s)
            leader.start()
            return
        master = self.replicated.master
        master.kill()
        wait_for(lambda: self.replicated.master is not master, "the copy is the master")
        time.sleep(down_s)
        master.start()
        self.replicated.wait_until_replicated()

    def pause_server(self, whose: str, for_s: float) -> None:
        """Stop the master of Redis, or the broker that leads most partitions, with SIGSTOP for `for_s`."""
        pid = (self._leading_broker() if whose == "kafka" else self.replicated.master).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        time.sleep(for_s)
        os.kill(pid, signal.SIGCONT)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the brokers.

        Redis' servers go on: Sentinel would have to stand still with them, and one that stood still while its master
        died takes no replica that was cut off for ten times `down-after-milliseconds` longer than it knows of. One that
        goes on makes the replica of a master that stands still the new master, and the old one takes writes until it is
        told, ten seconds later: these are lost, as the documents say.
        """
        for pid in [server.pid for server in self.cluster.servers.values() if server.pid is not None]:
            os.kill(pid, number)

    def _leading_broker(self) -> KafkaServer:
        """Return the broker that leads most partitions."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        topics = admin.list_topics(timeout=PATIENCE_S).topics.values()
        leaders = Counter(one.leader for topic in topics for one in topic.partitions.values())
        return self.cluster.servers[leaders.most_common(1)[0][0]]

    def __enter__(self) -> Self:
        self.replicated.start()
        self.cluster.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.stop()
        self.replicated.stop()
