"""A double of MirrorMaker 2 that honours `docker/mirror`: what it copies, and how, is read from that configuration.

Its one task copies each partition in order, with the time at which a message was written at home. With exactly-once
support what it reads at once is one transaction; a task that dies within one leaves it open, until the next task aborts
it and copies the same again. Without that support messages are copied again after a death.
"""

import re
import struct
from pathlib import Path
from random import Random

from penstock.bus.kafka.offsets import Partition
from penstock.messages import extract_request_id
from penstock.names import HEARTBEATS_TOPIC, copy_topic
from sim.world.kafka_broker import Entry, KafkaBroker
from sim.world.regions.servers import HOME, PEER, RegionServers, RegionWays
from sim.world.runtime import EPOCH_S, World

CONFIG = Path(__file__).parents[3] / "docker" / "mirror" / f"{HOME}-{PEER}.properties"
OWNER, TRANSACTION_S = "mirror", 60.0
BEAT_S, LEAST_LAG_S = 1.0, 0.05
MAX_READ = 50
"""How many messages of a partition are copied at once."""
DEATH_SHARE = 0.3
"""How often a task dies within a transaction, when it dies."""
AWAY_S = (1.0, 60.0)


def read_config() -> dict[str, str]:
    """Return the settings of the file, as Java reads them."""
    lines = (line.strip() for line in CONFIG.read_text("utf-8").splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name.strip(): value.strip().replace("\\\\", "\\") for name, _, value in pairs}


class Mirror:
    """Copies what `eu` accepted and answered to `us`."""

    def __init__(self, world: World, servers: RegionServers, ways: RegionWays, chance: Random, lag_s: float) -> None:
        config, self._way = read_config(), f"{HOME}->{PEER}"
        self._world, self._ways, self._chance, self._lag_s = world, ways, chance, lag_s
        self._home: KafkaBroker = servers.parts[HOME].broker
        self._peer: KafkaBroker = servers.parts[PEER].broker
        self._taken = re.compile(config[f"{self._way}.topics"])
        self._excluded = re.compile(config[f"{self._way}.topics.exclude"])
        self._is_committed = config[f"{self._way}.consumer.isolation.level"] == "read_committed"
        self._is_once = config.get(f"{PEER}.exactly.once.source.support") == "enabled"
        self._refresh_s = float(config["refresh.topics.interval.seconds"])
        self._places = dict[Partition, int]()
        """By partition at home: the next offset."""
        self._dead_until_s = self._looks_at_s = 0.0
        self._is_dying = self._is_begun = False
        self.copied = dict[tuple[str, str], float]()
        """When what had been committed was copied first, by topic at home and id of the request."""
        self._home.create_topics({HEARTBEATS_TOPIC: 1})
        world.start_thread(world.outside, "mirror", self._copy_forever)
        world.start_thread(world.outside, "heartbeats", self._beat_forever)

    def kill_task(self) -> None:
        """Let the task die, at once or within its next transaction."""
        self._is_dying = self._chance.random() < DEATH_SHARE
        if not self._is_dying:
            self._die()

    def _die(self) -> None:
        self._is_dying = self._is_begun = False
        self._dead_until_s = self._world.now_s + self._chance.uniform(*AWAY_S)

    def _can_copy(self) -> bool:
        is_dead = self._world.now_s < self._dead_until_s and not self._ways.is_calm
        stands = any(self._ways.pauses[f"{region}.bus"] > self._world.now_s for region in (HOME, PEER))
        return not is_dead and not stands and not self._ways.is_cut(PEER, HOME) and not self._ways.is_away(PEER)

    def _beat_forever(self) -> None:
        while True:
            self._world.sleep(BEAT_S)
            if self._can_copy():
                beat = struct.pack(">hq", 0, int(1000 * (EPOCH_S + self._world.now_s)))
                self._home.write_entries("", 0, [((HEARTBEATS_TOPIC, 0), Entry(beat, HOME.encode()))])

    def _copy_forever(self) -> None:
        while True:
            late_s = 0.0 if self._ways.is_calm else self._lag_s * self._chance.expovariate(1.0)
            self._world.sleep(LEAST_LAG_S + late_s)
            if not self._can_copy():
                continue
            if not self._is_begun:
                self._is_begun, self._key = True, self._peer.init_owner(OWNER, TRANSACTION_S)
            if self._world.now_s >= self._looks_at_s:
                self._find_topics()
            self._copy()

    def _find_topics(self) -> None:
        self._looks_at_s = self._world.now_s + self._refresh_s
        for topic, count in list(self._home.topics.items()):
            is_taken = self._taken.fullmatch(topic) and not self._excluded.fullmatch(topic)
            if is_taken or topic == HEARTBEATS_TOPIC:
                if copy_topic(HOME, topic) not in self._peer.topics:
                    self._peer.create_topics({copy_topic(HOME, topic): count})
                for number in range(count):
                    self._places.setdefault((topic, number), 0)

    def _copy(self) -> None:
        """Copy what is there, in one transaction."""
        entries, places, decided = list[tuple[Partition, Entry]](), dict(self._places), list[tuple[Partition, Entry]]()
        for (topic, number), begin in self._places.items():
            log = self._home.logs[topic, number]
            end = self._home.find_stable_end((topic, number)) if self._is_committed else len(log)
            places[topic, number] = end = max(begin, min(end, begin + MAX_READ))
            for one in log[begin:end]:
                if one.value is not None and (one.is_visible or not self._is_committed):
                    copy = Entry(one.value, one.key, one.headers, one.timestamp_ms)
                    entries.append(((copy_topic(HOME, topic), number), copy))
                    decided += entries[-1:] if one.is_visible else []
        if entries:
            self._peer.write_entries("", 0, entries, self._key if self._is_once else None)
            if self._is_dying:
                self._die()
                return
            if self._is_once:
                self._key = self._peer.end_transaction(self._key, "committed")
            self._note_copied(decided)
        self._places = places

    def _note_copied(self, entries: list[tuple[Partition, Entry]]) -> None:
        for (topic, _), entry in entries:
            if topic != copy_topic(HOME, HEARTBEATS_TOPIC):
                found = extract_request_id(entry.value or b"", None if entry.key is None else entry.key.decode())
                self.copied.setdefault((topic.removeprefix(f"{HOME}."), found or ""), self._world.now_s)
