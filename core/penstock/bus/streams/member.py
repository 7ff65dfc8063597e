"""A member of a stage's group on Redis Streams. It also takes over the deliveries of dead members."""

import contextlib
import logging
import math
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import redis

from penstock.bus.beats import BEATS, parse_beats
from penstock.bus.contract import Delivery, OrphanReader, Outgoing, Settlement, check_size
from penstock.bus.lost import LOST_KEPT_S
from penstock.bus.placement import ON_THE_WAY_S, WorkerBeat
from penstock.bus.streams.bell import StreamsBell
from penstock.bus.streams.client import (
    MAX_KEPT_ENTRIES,
    bus_errors,
    connect_client,
    create_groups,
    decode_entry,
    encode_entry,
    max_stream_entries,
)
from penstock.bus.streams.pull import Share, find_share
from penstock.config.settings import BusSettings
from penstock.errors import DeliveryLost, MemberFenced, ReplyRefused
from penstock.names import CLASSES, WORKERS_KEY, Pipeline, PriorityClass, WorkerKind
from penstock.redis.client import find_pace, raise_first_error
from penstock.redis.scripts import RELEASE_LEASE, RENEW_LEASE, ScriptCall, load_script

log = logging.getLogger(__name__)

ANSWERED = load_script("penstock.bus.streams", "answered")
READ = load_script("penstock.bus.streams", "read")
RECLAIM = load_script("penstock.bus.streams", "reclaim")
LOST = load_script("penstock.bus.streams", "lost")
SETTLE = load_script("penstock.bus.streams", "settle")

MAX_BLOCK_S = 0.25
"""How often a waiting member looks for deliveries of members that are gone."""
SLOW_LOOK_S, LOOK_PAUSES, MAX_LOOK_PAUSE_S = 0.05, 8, 10.0
"""The loop waits for each look at the server. So where one takes longer than `SLOW_LOOK_S`, the pause before the next
is so many times as long, up to `MAX_LOOK_PAUSE_S`, unless the worker is idle.
"""
LOST_CHECK_S = 5.0
"""How often a member looks whether somebody has deleted entries."""
BEATS_S = 1.0
"""How often a member that reads requests looks at the workers' heartbeats, which are as old."""
LEFT_LOOK_S = 0.05
"""How often an idle member looks again at messages that it has left to others."""
NUM_LAST_RESULTS = 1000
"""So many results are looked through for requests that were answered, when a member joins."""
MAX_PAGE_ENTRIES = 500
Entry = tuple[bytes, "dict[bytes, bytes] | None"]
Left = dict[PriorityClass, int]
"""How many more messages of each class may be taken."""


class StreamsMember:
    """Reads the streams of a stage as one consumer of its group.

    A member's key in Redis holds the token of its newest incarnation, whose consumer in the group has the name
    `<name>/<token>`. The worker's session renews the key with itself, and each poll does where that is due. A consumer
    whose member's key expired or holds another token is considered dead, and within `MAX_BLOCK_S` another member with
    capacity takes over its deliveries. So a worker keeps them over a lost session that is shorter than the timeout.
    """

    def __init__(self, pipeline: Pipeline, url: str, settings: BusSettings, stage: WorkerKind, name: str) -> None:
        self._pipeline, self._stage = pipeline, stage
        self._group = pipeline.consumer_group(stage)
        self._token = uuid.uuid4().hex
        self._consumer = f"{name}/{self._token}"
        self._key = pipeline.member_key(self._group, name)
        self._key_prefix = pipeline.member_key(self._group, "")
        self.reply_prefixes = settings.find_reply_prefixes()
        self._timeout_s = settings.session_timeout_s
        self._lasts_s = self._timeout_s
        """How long this member is kept after a renewal: the timeout begins when the session is over, if it has one."""
        self._topics: dict[PriorityClass, str] = pipeline.input_topics(stage)
        self.client = connect_client(url)
        self._held: dict[tuple[str, str], Delivery] = {}
        self._doubtful: set[tuple[str, str]] = set()  # other members may have taken these over
        self._lock = threading.Lock()  # guards `_held` and `_doubtful`
        self._reclaim_at = 0.0
        self._renewed_s = time.monotonic()
        self._beats: list[WorkerBeat] = []
        self._beats_at_s = -math.inf
        self._taken_s = deque[float]()
        """When interactive messages were read, since this worker's heartbeat that is known."""
        self._recovering = False  # a reply was lost: this member may hold deliveries that it does not know
        self._fenced = False
        self.current_problem = ""  # always: an outage makes `poll` raise
        self._is_closed = False
        self._join_group()
        self._reader = StreamsReader([self], url)

    @property
    def slowness(self) -> int:
        """By how many times longer than usual settlements may take; see `contract.Member.slowness`."""
        return find_pace(self.client).slowness

    def poll(self, timeout_s: float, capacity: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return deliveries of the classes with capacity, interactive first; see `contract.Member.poll`."""
        return self._reader.poll(timeout_s, capacity)

    def note_lost_reply(self) -> None:
        """Note that this member may hold deliveries that it does not know."""
        self._recovering = True

    def mend_groups(self, error: redis.RedisError) -> None:
        """Create the groups anew that the server has lost. Raise the error where it says another thing."""
        if not str(error).startswith(("NOGROUP", "UNBLOCKED", "no such key")):
            raise error
        create_groups(self.client, self._pipeline, self._stage)  # the server lost its data, or some of it

    def settle(self, settlements: Sequence[Settlement]) -> None:
        """Publish and finish in one script: after a crash either all of it happened, or none."""
        self._raise_if_fenced()
        if not settlements:
            return
        outputs = [output for settlement in settlements for output in settlement.outputs]
        check_size(outputs)
        deliveries = [settlement.delivery for settlement in settlements if settlement.delivery.is_held]
        with self._lock:  # one that came again is another delivery
            lost = [one for one in deliveries if self._held.get(one.address, one) is not one]
        if lost:
            raise DeliveryLost(lost)
        places = [delivery.address for delivery in deliveries]
        stream_key = self._pipeline.stream_key
        keys = [
            self._key,
            self._pipeline.meter_key("places"),
            self._pipeline.finished_key,
            *(stream_key(topic) for topic, _ in places),
            *(output.topic if output.is_reply else stream_key(output.topic) for output in outputs),
        ]
        words: list[Any] = [
            self._token,
            int(self._lasts_s * 1000),
            self._group,
            self._consumer,
            len(places),
        ]
        words += [*(position for _, position in places), *(topic for topic, _ in places)]
        for output in outputs:
            entry = [word for pair in encode_entry(output).items() for word in pair]
            what = "reply" if output.is_reply else "result" if output.topic == self._pipeline.results_topic else ""
            most = MAX_KEPT_ENTRIES if output.is_reply else max_stream_entries(self._pipeline, output.topic)
            words += [most, what, len(entry), *entry]
        replies = sorted({output.topic for output in outputs if output.is_reply})
        with bus_errors():
            try:
                refused = SETTLE.run(self.client, keys, words)
            except redis.exceptions.NoPermissionError as error:  # it was not run, as a key of it is not allowed
                if replies:
                    raise ReplyRefused(dict.fromkeys(replies, f"Redis: {error}"), is_sure=False) from error
                raise
        if refused[:1] == [-2]:
            raise ReplyRefused(
                {outputs[index].topic: "it is no stream: create it first (XGROUP CREATE … MKSTREAM)"
                 for index in refused[1:]}, is_sure=True,
            )  # fmt: skip
        if refused == [-1]:
            self._fenced = True
            self._raise_if_fenced()
        lost = [deliveries[index] for index in refused]
        with self._lock:
            for gone in lost or deliveries:
                self._held.pop(gone.address, None)
        if lost:
            raise DeliveryLost(lost)

    def find_reply_refusals(self, replies: Sequence[Outgoing]) -> list[str]:
        """Return nothing against any: the script that settles looks at their streams itself."""
        return [""] * len(replies)

    def count_held(self) -> int:
        """Return how many deliveries this member holds unsettled."""
        with self._lock:
            return len(self._held)

    def is_holding(self, delivery: Delivery) -> bool:
        """Return whether a delivery is still this member's.

        As long as this member renews its key in time no other member takes its deliveries. The server is asked about
        those that it held when a renewal was late.
        """
        where = delivery.address
        with self._lock:
            is_held, is_sure = delivery.is_held and self._held.get(where) is delivery, where not in self._doubtful
        if not is_held or (is_sure and time.monotonic() - self._renewed_s < self._lasts_s):
            return is_held
        topic, position = where
        with bus_errors():
            stream = self._pipeline.stream_key(topic)
            is_held = bool(self.client.xpending_range(stream, self._group, position, position, 1, self._consumer))
        with self._lock:
            self._doubtful.discard(where)
            if not is_held:
                self._held.pop(where, None)
        return is_held

    def list_prefetched(self) -> list[Delivery]:
        """Return nothing: a member fetches only as many messages as it has capacity for."""
        return []

    def list_partitions(self) -> list[str]:
        """Return nothing: members share the streams."""
        return []

    def count_waiting(self) -> Mapping[tuple[str, int], int]:
        """Return nothing: members share the topics."""
        return {}

    def create_orphan_readers(self) -> list[OrphanReader]:
        """Return none: any member can read the messages that no member has polled."""
        return []

    def build_renewal(self, session_s: float) -> list[ScriptCall]:
        """Return the call that renews this member's key; see `contract.Member.build_renewal`. A call that reads the
        workers' heartbeats goes with it at times, where this member reads requests.
        """
        self._lasts_s, now_s = session_s + self._timeout_s, time.monotonic()
        calls = [self._build_renewal()]
        if self._stage in ("prefill", "auto") and now_s - self._beats_at_s >= BEATS_S:
            self._beats_at_s = now_s
            prefixes = [self._pipeline.worker_key(kind, "") for kind in ("prefill", "auto")]
            calls.append(ScriptCall(BEATS, [WORKERS_KEY], prefixes, partial(self._note_beats, now_s)))
        return calls

    def _note_beats(self, asked_s: float, told: Sequence[tuple[bytes, bytes, int]]) -> None:
        """Note the workers' heartbeats. Any thread may call this."""
        self._beats = parse_beats(self._pipeline, told, asked_s)

    def find_shares(self) -> list[Share | None]:
        """Return for each stream of `list_reads` what this member may take of it; None if it may take all."""
        name, beats, now_s = f"{self._stage}:{self._consumer.rpartition('/')[0]}", self._beats, time.monotonic()
        since_s = next((beat.at_s - ON_THE_WAY_S for beat in beats if beat.worker == name), math.inf)
        while self._taken_s and self._taken_s[0] < since_s:
            self._taken_s.popleft()
        share = find_share(name, beats, self._taken_s, now_s)
        return [share if priority_class == "interactive" else None for priority_class in CLASSES]

    def _build_renewal(self) -> ScriptCall:
        on_reply = partial(self._note_renewal, time.monotonic())
        return ScriptCall(RENEW_LEASE, [self._key], [self._token, int(self._lasts_s * 1000)], on_reply)

    def stop_consuming(self) -> None:
        """Do nothing: any member can read the messages that this member has not polled."""

    def close(self) -> None:
        """Leave the group: other members take over the unsettled deliveries."""
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.close()
        with contextlib.suppress(redis.RedisError):  # else they wait for the session timeout
            RELEASE_LEASE.run(self.client, [self._key], [self._token])
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join_group(self) -> None:
        with bus_errors():
            create_groups(self.client, self._pipeline, self._stage)
            self._find_lost(time.monotonic())  # before it finishes anything: older versions counted nothing
            results = self._pipeline.stream_key(self._pipeline.results_topic)
            found = ANSWERED.run(self.client, [results], [NUM_LAST_RESULTS])
            self._answered_ms = {key: _read_time(entry_id) for entry_id, key in reversed(found)}
            self.client.set(self._key, self._token, px=int(self._lasts_s * 1000))

    def _note_renewal(self, begun_s: float, is_held: int) -> None:
        """Note the reply to a renewal that began at `begun_s`. Any thread may call this."""
        with self._lock:
            if not is_held:
                self._fenced = True
                return
            if begun_s - self._renewed_s >= self._lasts_s:
                self._doubtful = set(self._held)
            self._renewed_s = begun_s

    def _raise_if_fenced(self) -> None:
        if self._fenced:
            raise MemberFenced(f"a newer member has the place of {self._consumer}")

    def take_known(self, left: Left) -> list[Delivery]:
        """Renew this member where that is due. Return the deliveries that it has or may have for other reasons than
        that they are new, and lessen what is left by them. Raise errors of Redis' client, and `MemberFenced`.

        Capacity goes to them in this order. 1. Deliveries of this member whose reply was lost. 2. Those of members that
        are gone.
        """
        if time.monotonic() - self._renewed_s >= self._lasts_s / 3:  # no session has renewed it
            renewal = self._build_renewal()
            renewal.run(self.client)
            renewal.read_reply()
        self._raise_if_fenced()
        found: list[Delivery] = []
        if self._recovering:  # 1
            found += self._recover_lost_replies(left)
        if (begun_s := time.monotonic()) >= self._lost_check_at:
            self._find_lost(begun_s)
        if (begun_s := time.monotonic()) >= self._reclaim_at:  # 2
            found += self._reclaim_dead_members(left)
            pause_s = max(min(MAX_BLOCK_S, self._timeout_s / 3), 4 * _find_pause(begun_s))
            self._reclaim_at = time.monotonic() + min(pause_s, MAX_LOOK_PAUSE_S)
        return found

    def _find_lost(self, begun_s: float) -> None:
        """Tell of entries that somebody deleted before they were finished."""
        names, topics = self._pipeline, list(self._topics.values())
        keys = [names.finished_key, names.lost_key, *map(names.stream_key, topics)]
        for topic, count in zip(topics, LOST.run(self.client, keys, [LOST_KEPT_S, *topics]), strict=True):
            if count:
                log.warning("Redis Streams: %d messages of %s were deleted before they were answered", count, topic)
        self._lost_check_at = time.monotonic() + max(LOST_CHECK_S, 4 * _find_pause(begun_s))

    def list_reads(self) -> list[tuple[str, str, str, int]]:
        """Return of each stream what the script that reads it has to know: its key, group, consumer and class."""
        key_of, who = self._pipeline.stream_key, (self._group, self._consumer)
        return [
            (key_of(self._topics[priority_class]), *who, number) for number, priority_class in enumerate(CLASSES, 1)
        ]

    def accept_new(self, taken: Sequence[Any], left: Left) -> list[Delivery]:
        """Return the deliveries of the entries that the script has read, of each stream of `list_reads`."""
        found: list[Delivery] = []
        for priority_class, entries in zip(CLASSES, taken, strict=True):
            if priority_class == "interactive":
                self._taken_s += [time.monotonic()] * len(entries)
            found += self._accept_entries(self._topics[priority_class], _pair_fields(entries), left)
        return found

    def _recover_lost_replies(self, left: Left) -> list[Delivery]:
        """Return deliveries that the server has assigned to this member and that the member does not know."""
        with self._lock:
            known = set(self._held)
        found: list[Delivery] = []
        complete = True
        for topic, count in self._list_streams(left):
            cursor: bytes = b"0"
            unknown: list[Entry] = []
            while page := self._own_entries(topic, cursor):
                unknown += [entry for entry in page if (topic, entry[0].decode()) not in known]
                cursor = page[-1][0]
            complete = complete and len(unknown) <= count
            found += self._accept_entries(topic, unknown[:count], left)
        self._recovering = not complete
        return found

    def _own_entries(self, topic: str, after: bytes) -> "list[Entry]":
        streams: dict[Any, Any] = {self._pipeline.stream_key(topic): after}
        reply: Any = self.client.xreadgroup(self._group, self._consumer, streams, count=MAX_PAGE_ENTRIES)
        return [entry for _, entries in reply or () for entry in entries]

    def _reclaim_dead_members(self, left: Left) -> list[Delivery]:
        """Take over the deliveries of members that are gone, and return them."""
        wanted = self._list_streams(left)
        keys = [self._pipeline.stream_key(topic) for topic, _ in wanted]
        capacities = [min(count, MAX_PAGE_ENTRIES) for _, count in wanted]
        taken = RECLAIM.run(self.client, keys, [self._group, self._consumer, self._key_prefix, *capacities])
        found: list[Delivery] = []
        for (topic, _), entries in zip(wanted, taken, strict=True):
            found += self._accept_entries(topic, _pair_fields(entries), left)
        return found

    def _list_streams(self, left: Mapping[PriorityClass, int]) -> list[tuple[str, int]]:
        """Return the topics of this stage, and how many messages of each may be taken now."""
        return [(self._topics[priority_class], left.get(priority_class, 0)) for priority_class in CLASSES]

    def _accept_entries(self, topic: str, entries: "Sequence[Entry]", left: Left) -> list[Delivery]:
        """Return the deliveries of entries that now belong to this member."""
        passed: list[bytes] = []
        found: list[Delivery] = []
        for entry_id, fields in entries:
            if fields is None:  # it was deleted from the stream
                passed.append(entry_id)
                continue
            position = entry_id.decode()
            priority_class = next(priority_class for priority_class in CLASSES if topic == self._topics[priority_class])
            value, key, headers = decode_entry(fields)
            published_ms = _read_time(entry_id)
            since_result_s = (published_ms - self._answered_ms.get(fields.get(b"key", b""), -math.inf)) / 1000
            found.append(
                Delivery(
                    topic, position, value, key, headers, priority_class, published_ms / 1000, True, since_result_s
                )
            )
        if passed:
            self.client.xack(self._pipeline.stream_key(topic), self._group, *passed)
        self._note_held(found, left)
        return found

    def _note_held(self, found: Sequence[Delivery], left: Left) -> None:
        with self._lock:
            for delivery in found:
                self._held[delivery.address] = delivery
                left[delivery.priority_class] -= 1


class StreamsReader:
    """Reads messages for members on one server: a worker that serves both stages has two. Messages of an earlier member
    come first.
    """

    def __init__(self, members: Sequence[StreamsMember], url: str) -> None:
        self._members, self._bell, self._closing = members, StreamsBell(url), threading.Event()
        self._reads = [stream for member in members for stream in member.list_reads()]
        self._read_at = 0.0
        self._leaves = False
        """Whether the last look at the server left something that there was capacity for."""
        self._taken: list[Delivery] = []
        """Deliveries that were not returned yet, as something failed after they were taken."""

    def poll(self, timeout_s: float, capacity: Mapping[PriorityClass, int]) -> list[Delivery]:
        """Return deliveries of the classes with capacity, interactive first; see `contract.Member.poll`."""
        end = time.monotonic() + timeout_s
        while True:
            with bus_errors():
                try:
                    self._take(capacity, is_idle=timeout_s > 0)
                    left_s = end - time.monotonic()
                    if not self._taken and left_s > 0:
                        self._wait(min(LEFT_LOOK_S if self._leaves else MAX_BLOCK_S, left_s))
                except redis.RedisError as error:
                    self._bell.reset()
                    for member in self._members:
                        member.note_lost_reply()
                    for member in self._members:
                        member.mend_groups(error)
            if self._taken or self._closing.is_set() or time.monotonic() >= end:
                found, self._taken = self._taken, []
                return sorted(found, key=lambda delivery: CLASSES.index(delivery.priority_class))

    def _take(self, capacity: Mapping[PriorityClass, int], *, is_idle: bool) -> None:
        """Add what can be had without waiting to what was taken. The server is asked for new messages only if the bell
        does not know that there are none.
        """
        held = Counter(delivery.priority_class for delivery in self._taken)
        left = {
            priority_class: max(0, capacity.get(priority_class, 0) - held[priority_class]) for priority_class in CLASSES
        }
        for member in self._members:
            self._taken += member.take_known(left)
        wanted = [key for key, _, _, number in self._reads if left[CLASSES[number - 1]]]
        if wanted and (is_idle or time.monotonic() >= self._read_at) and not self._bell.is_watching(wanted):
            self._take_new(left)

    def _take_new(self, left: Left) -> None:
        """Read the members' streams in one round trip. Where nothing is left, the bell watches them from now on."""
        words, begun_s = list[Any](left[priority_class] for priority_class in CLASSES), time.monotonic()
        shares = [share for member in self._members for share in member.find_shares()]
        for (_, *about), share in zip(self._reads, shares, strict=True):
            words += about
            words += ("", "", "") if share is None else (share.ahead, share.part, round(1000 * share.max_wait_s))
        keys = [key for key, *_ in self._reads]
        command = READ.command(keys, words)
        [(found, after)] = raise_first_error(READ.run_once(self._members[0].client, [command]))
        self._read_at = time.monotonic() + _find_pause(begun_s)
        per_member = len(CLASSES)
        for number, member in enumerate(self._members):
            self._taken += member.accept_new(found[number * per_member :][:per_member], left)
        self._leaves = any(share is not None and not last for share, last in zip(shares, after, strict=True))
        self._bell.watch({key: last for key, last in zip(keys, after, strict=True) if last})

    def _wait(self, timeout_s: float) -> None:
        """Wait for a message in the streams that the bell watches, or for `close`."""
        if self._bell.is_waiting:
            self._bell.wait(timeout_s)
        else:
            self._closing.wait(timeout_s)

    def close(self) -> None:
        """Free the connection."""
        self._closing.set()
        self._bell.close()


def _find_pause(begun_s: float) -> float:
    """Return how long to wait after a look at the server that began at `begun_s`."""
    took_s = time.monotonic() - begun_s
    return min(LOOK_PAUSES * took_s, MAX_LOOK_PAUSE_S) if took_s > SLOW_LOOK_S else 0.0


def _pair_fields(entries: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[Entry]:
    """Return entries as a script replies them, with their fields by name."""
    return [(entry_id, dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in entries]


def _read_time(entry_id: bytes) -> int:
    """Return when an entry was added, in ms."""
    return int(entry_id.partition(b"-")[0])
