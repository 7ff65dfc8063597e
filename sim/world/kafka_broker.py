"""Kafka's brokers in memory, for the second level: logs with transactions, KIP-848 groups, and ids that are fenced.

Each method is one request, executed whole. What waits is the client's, `sim.world.kafka_client`.
"""

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.bus.contract import Outgoing, as_text
from penstock.bus.kafka.offsets import Partition, decode_ranges
from penstock.names import STAGES, Pipeline, find_shared_topic
from sim.world.runtime import EPOCH_S, SimCondition, World

SESSION_S = 6.0
"""How long a member is kept without a heartbeat."""
CHECK_S = 0.5
"""How often sessions and transactions are looked at."""
LEADER_EPOCH = 3
"""Of all leaders, until others are elected."""

OwnerKey = tuple[str, int, int]
"""Of a producer with a transactional id: the id, its epoch, and how many of its transactions ended."""
MemberKey = tuple[str, int]
"""A member of a group, and its epoch."""


def make_failure(code: int, *, fatal: bool = False, retriable: bool = False) -> KafkaException:
    """Return an error as the client raises it."""
    return KafkaException(KafkaError(code, None, fatal, retriable))


@dataclass(eq=False)
class Transaction:
    """What one producer writes between two of its commits."""

    begun_s: float
    outcome: str = "open"
    partitions: set[Partition] = field(default_factory=set)
    group: str = ""
    offsets: list[TopicPartition] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """A message in a log. A marker of a transaction has no value."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes]] = ()
    timestamp_ms: int = 0
    transaction: Transaction | None = None
    epoch: int = LEADER_EPOCH
    """The leader epoch under which it was written."""

    @property
    def is_visible(self) -> bool:
        """Whether readers of committed messages get it."""
        return self.value is not None and (self.transaction is None or self.transaction.outcome == "committed")


@dataclass
class Owner:
    """A producer with a transactional id."""

    epoch: int = 0
    timeout_s: float = 0.0
    current: Transaction | None = None
    num_ended: int = 0
    """How many of its transactions ended. What arrives of an ended one is refused (KIP-890)."""
    last: str = ""
    """How the last one ended."""


@dataclass
class Membership:
    """A member of a group, as the brokers know it."""

    topics: Sequence[str]
    epoch: int
    seen_s: float
    owned: set[Partition] = field(default_factory=set)


@dataclass
class Group:
    """The members of a stage. An assignment holds from an epoch on."""

    epoch: int = 0
    members: dict[str, Membership] = field(default_factory=dict)
    target: dict[Partition, str] = field(default_factory=dict)
    commits: dict[Partition, TopicPartition] = field(default_factory=dict)


class KafkaBroker:
    """All brokers of a cluster."""

    def __init__(self, world: World, topics: Mapping[str, int]) -> None:
        self._world = world
        self.topics = dict[str, int]()
        """How many partitions each topic has."""
        self.logs = dict[Partition, list[Entry]]()
        self.begins = dict[Partition, int]()
        """Where the logs begin: what is before was deleted."""
        self.create_topics(topics)
        self.changed = SimCondition(world)
        """Is notified of all that a consumer may wait for."""
        self._groups: dict[str, Group] = {}
        self._owners: dict[str, Owner] = {}
        self._written: dict[str, int] = {}
        """How many messages each idempotent producer has written."""
        self.stands_until_s: Callable[[], float] = lambda: 0.0
        self.full_until_s: Callable[[], float] = lambda: 0.0
        """Until when logs take no messages, and groups no offsets but those of transactions. All else goes on."""
        self.refused = set[str]()
        """Topics to which nobody may write any more, though the brokers say so only to who writes."""
        self._numbers = itertools.count(1)
        self._epoch = LEADER_EPOCH
        world.start_thread(world.outside, "kafka", self._watch)

    def create_topics(self, topics: Mapping[str, int]) -> None:
        """Create topics with so many partitions each. Members that come to their groups later may read them."""
        self.topics |= topics
        made = [(topic, number) for topic, count in topics.items() for number in range(count)]
        self.logs |= {partition: [] for partition in made}
        self.begins |= dict.fromkeys(made, 0)

    def make_name(self) -> str:
        """Return a name that no client has."""
        return f"{next(self._numbers):06}"

    def _watch(self) -> None:
        """End members and transactions whose time is over, but for the time in which the brokers stood still."""
        while True:
            self._world.sleep(CHECK_S)
            now_s = self._world.now_s
            if now_s < self.stands_until_s() + SESSION_S:
                continue
            for group in self._groups.values():
                for name, member in list(group.members.items()):
                    if now_s - member.seen_s > SESSION_S:
                        self._remove_member(group, name)
            for owner in self._owners.values():
                if owner.current is not None and now_s - owner.current.begun_s > owner.timeout_s:
                    owner.epoch += 1
                    self._end_transaction(owner, "aborted")

    # Logs.

    def write_entries(
        self, writer: str, first: int, entries: Sequence[tuple[Partition, Entry]], owner: OwnerKey | None = None
    ) -> int:
        """Write messages, those without a time at that of now, and return the offset of the last. Those that an
        idempotent writer sends again are known by their number, from `first` on.
        """
        self._check_space()
        topics = {partition[0] for partition, _ in entries}
        if not topics <= self.topics.keys():
            raise make_failure(KafkaError.UNKNOWN_TOPIC_OR_PART)
        if topics & self.refused:
            raise make_failure(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        transaction = None
        if owner is not None:
            transaction = self._find_transaction(owner)
        known = self._written.get(writer, 0) - first if writer else 0
        for partition, entry in entries[max(0, known) :]:
            if transaction is not None:
                transaction.partitions.add(partition)
            stamp = entry.timestamp_ms or int(1000 * (EPOCH_S + self._world.now_s))
            written = Entry(entry.value, entry.key, entry.headers, stamp, transaction, self._epoch)
            self.logs[partition].append(written)
        if writer:
            self._written[writer] = max(self._written.get(writer, 0), first + len(entries))
        self.changed.notify_all()
        return len(self.logs[entries[-1][0]]) - 1

    def delete_records(self, partition: Partition, begin: int) -> list[Entry]:
        """Delete what is before an offset, as retention does. Return the messages of these."""
        before, self.begins[partition] = self.begins[partition], begin
        return [entry for entry in self.logs[partition][before:begin] if entry.is_visible]

    def forget_commits(self) -> None:
        """Forget what groups without members have committed, as brokers do after a week."""
        for group in self._groups.values():
            if not group.members:
                group.commits.clear()

    def _check_space(self) -> None:
        if self._world.now_s < self.full_until_s():
            raise make_failure(KafkaError.NOT_ENOUGH_REPLICAS, retriable=True)

    def elect_leaders(self) -> None:
        """Let all partitions have new leaders, with a newer epoch."""
        self._epoch += 1

    def find_epoch_end(self, partition: Partition, epoch: int) -> int:
        """Return up to where a log was written under a leader epoch, or older ones."""
        newer = (at for at, entry in enumerate(self.logs[partition]) if entry.epoch > epoch)
        return next(newer, len(self.logs[partition]))

    def find_stable_end(self, partition: Partition) -> int:
        """Return up to where the log can be read: before the first message of an open transaction."""
        log = self.logs[partition]
        opened = (at for at, entry in enumerate(log) if entry.transaction and entry.transaction.outcome == "open")
        return next(opened, len(log))

    def choose_partition(self, topic: str, key: bytes | None) -> int:
        """Return the partition of a key."""
        return zlib.crc32(key or b"") % self.topics.get(topic, 1)

    # Transactions.

    def init_owner(self, owner_id: str, timeout_s: float) -> OwnerKey:
        """Begin to use a transactional id: whoever used it before is fenced."""
        owner = self._owners.setdefault(owner_id, Owner())
        owner.epoch, owner.timeout_s = owner.epoch + 1, timeout_s
        if owner.current is not None:
            self._end_transaction(owner, "aborted")
        return owner_id, owner.epoch, owner.num_ended

    def _check_owner(self, key: OwnerKey) -> Owner:
        owner = self._owners[key[0]]
        if owner.epoch != key[1]:
            raise make_failure(KafkaError._FENCED, fatal=True)  # noqa: SLF001 - that is its name
        return owner

    def _find_transaction(self, key: OwnerKey) -> Transaction:
        owner = self._check_owner(key)
        if owner.num_ended != key[2]:
            raise make_failure(KafkaError.INVALID_TXN_STATE)
        owner.current = owner.current or Transaction(self._world.now_s)
        return owner.current

    def add_offsets(self, key: OwnerKey, group: str, offsets: Sequence[TopicPartition], member: MemberKey) -> None:
        """Commit offsets with the transaction, for a member of the group in its present epoch."""
        self._check_owner(key)
        self._check_member(group, *member)
        transaction = self._find_transaction(key)
        transaction.group, transaction.offsets = group, list(offsets)

    def end_transaction(self, key: OwnerKey, outcome: str) -> OwnerKey:
        """Commit or abort. May be repeated. Return the key of the next transaction."""
        owner = self._check_owner(key)
        if owner.num_ended == key[2]:
            owner.current = owner.current or Transaction(self._world.now_s)
            self._end_transaction(owner, outcome)
        elif owner.last != outcome:
            raise make_failure(KafkaError.INVALID_TXN_STATE, fatal=True)
        return key[0], key[1], owner.num_ended

    def _end_transaction(self, owner: Owner, outcome: str) -> None:
        transaction, owner.current, owner.last = owner.current, None, outcome
        assert transaction is not None
        transaction.outcome = outcome
        owner.num_ended += 1
        for partition in sorted(transaction.partitions):
            self.logs[partition].append(Entry(None, epoch=self._epoch))
        if outcome == "committed" and transaction.offsets:
            self._note_commits(transaction.group, transaction.offsets)
        self.changed.notify_all()

    # Groups.

    def _find_group(self, name: str) -> Group:
        return self._groups.setdefault(name, Group())

    def beat(self, group: str, name: str, topics: Sequence[str], owned: set[Partition]) -> tuple[int, set[Partition]]:
        """Note a heartbeat, or that a member joins. Return its epoch, and the partitions that are to be its own.

        A member that has to give up partitions stays at its epoch until it says that it has, and nobody gets them
        before. Raise `UNKNOWN_MEMBER_ID` where a member that owns partitions is not known any more.
        """
        found = self._find_group(group)
        member = found.members.get(name)
        if member is None:
            if owned:
                raise make_failure(KafkaError.UNKNOWN_MEMBER_ID)
            member = found.members[name] = Membership(topics, 0, self._world.now_s)
            self._assign_anew(found)
        member.seen_s, member.owned = self._world.now_s, set(owned)
        mine = {partition for partition, owner in found.target.items() if owner == name}
        if owned <= mine:
            member.epoch = found.epoch
            taken = {partition for other in found.members.values() if other is not member for partition in other.owned}
            member.owned |= mine - taken
        return member.epoch, member.owned & mine

    def leave(self, group: str, name: str) -> None:
        """Let a member go."""
        found = self._find_group(group)
        if name in found.members:
            self._remove_member(found, name)

    def fence(self, group: str, client: str) -> None:
        """Let a member go as if its time were over."""
        found = self._find_group(group)
        for name in [name for name in found.members if name.startswith(f"{client}/")]:
            self._remove_member(found, name)

    def _remove_member(self, group: Group, name: str) -> None:
        del group.members[name]
        self._assign_anew(group)

    def _assign_anew(self, group: Group) -> None:
        """Deal out the partitions of each topic by itself, as the assignor `range` does."""
        group.epoch, group.target = group.epoch + 1, {}
        for topic, count in self.topics.items():
            names = sorted(name for name, member in group.members.items() if topic in member.topics)
            for number in range(count if names else 0):
                group.target[topic, number] = names[number * len(names) // count]
        self.changed.notify_all()

    def _check_member(self, group: str, name: str, epoch: int) -> None:
        member = self._find_group(group).members.get(name)
        if member is None:
            raise make_failure(KafkaError.UNKNOWN_MEMBER_ID)
        if member.epoch != epoch:
            raise make_failure(KafkaError.STALE_MEMBER_EPOCH)

    def commit(self, group: str, offsets: Sequence[TopicPartition], member: MemberKey) -> None:
        """Commit offsets of a member in its present epoch."""
        self._check_member(group, *member)
        self._check_space()
        self._note_commits(group, offsets)

    def _note_commits(self, group: str, offsets: Iterable[TopicPartition]) -> None:
        self._find_group(group).commits |= {(place.topic, place.partition): place for place in offsets}

    def read_commits(self, group: str, wanted: Iterable[Partition], *, stable: bool) -> list[TopicPartition]:
        """Return the last commits. Where they have to be stable, raise as long as a transaction may change one."""
        asked, commits = list(wanted), self._find_group(group).commits
        for owner in self._owners.values():
            pending = owner.current
            places = pending.offsets if pending is not None and pending.group == group else []
            if stable and {(place.topic, place.partition) for place in places} & set(asked):
                raise make_failure(KafkaError.UNSTABLE_OFFSET_COMMIT, retriable=True)
        return [commits.get(partition, TopicPartition(*partition)) for partition in asked]

    # The judge.

    def list_unsettled(self, group: str, partition: Partition) -> list[int]:
        """Return the offsets of the visible messages that a group has not finished."""
        place = self._find_group(group).commits.get(partition)
        begin = max(self.begins[partition], place.offset if place is not None else 0)
        done = decode_ranges(place.metadata, begin) if place is not None else []
        return [
            offset
            for offset, entry in enumerate(self.logs[partition])
            if offset >= begin and entry.is_visible and not any(low <= offset <= high for low, high in done)
        ]


class BrokerBus:
    """The bus as the judge reads it."""

    def __init__(self, pipeline: Pipeline, broker: KafkaBroker) -> None:
        self._pipeline, self._broker = pipeline, broker

    def read_all(self, topic: str) -> list[Outgoing]:
        """Return every message now visible in a topic, and in those beside it that tenants have of their own."""
        return [
            Outgoing(
                name, entry.value or b"", None if entry.key is None else as_text(entry.key),
                {name: as_text(raw) for name, raw in entry.headers},
            )
            for (name, _), log in self._broker.logs.items() if topic in {name, find_shared_topic(name)}
            for entry in log if entry.is_visible
        ]  # fmt: skip

    def count_unsettled(self) -> dict[str, int]:
        """Return how many messages of each input topic are not settled."""
        inputs = {topic: stage for stage in STAGES for topic in self._pipeline.input_topics(stage).values()}
        shared = {topic: find_shared_topic(topic) for topic in self._broker.topics}
        topics = {topic: inputs[shared[topic]] for topic in self._broker.topics if shared[topic] in inputs}
        return {
            topic: sum(
                len(self._broker.list_unsettled(self._pipeline.consumer_group(stage), (topic, number)))
                for number in range(self._broker.topics[topic])
            )
            for topic, stage in topics.items()
        }
