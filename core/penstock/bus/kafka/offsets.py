"""Keeps which offsets of one partition are finished, where work ends out of order. Plain Python, no I/O.

The committed offset is the first *delivered* offset that is not finished (or the one after the last
delivered), and the commit's metadata carries the finished ones beyond it. Offsets that the log leaves out
(transaction markers, aborted messages) are known as such once a later one was delivered, and count as
finished: so runs stay runs.

    offset     10 11 12 13 14 15 16 17
    state       f  f  .  f  -  f  f          f finished   . unfinished   - left out by the log
    committed        12, and the metadata says 13..16

Where the brokers forgot a commit, messages before the log's end of that time may be answered though no commit says so.
The metadata of later commits names that end until it is passed: the partition's next owner has to know it, too.

A partition is read on only while its metadata is sure to have room for all offsets that may be finished. Nor is it read
too far beyond its first unfinished offset (`window_usage`). So a restart repeats no finished work, however slow one
request is.
"""

import base64
import binascii
from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from penstock.bus.contract import Delivery

MAX_METADATA_BYTES = 4000
"""A broker takes 4,096 by default."""

MAX_OFFSETS_AHEAD = 100_000
"""How far a partition is read beyond its first unfinished offset. After a restart, up to this many messages are read
again and passed over."""

_PREFIX, _FORGOTTEN = "penstock1:", ";"
_ALLOWED_BYTES = (MAX_METADATA_BYTES - len(_PREFIX)) // 4 * 3 - 64
"""The most bytes of metadata before base64, less those that the next message may add."""
NO_EPOCH = -1
"""An unknown leader epoch, as the Kafka client returns it."""
Partition = tuple[str, int]
"""Topic and number."""
Range = tuple[int, int]
"""First and last offset, both included."""


def parse_place(place: str) -> tuple[Partition, int]:
    """Return partition and offset of a message's place, `topic@partition:offset`."""
    topic, _, position = place.rpartition("@")
    number, _, offset = position.partition(":")
    return (topic, int(number)), int(offset)


class StartPosition(NamedTuple):
    """The last commit of a group for a partition: where to begin to read it."""

    offset: int
    metadata: str
    leader_epoch: int | None
    forgotten_end: int = 0
    """Where the brokers forgot a commit: the end of the log when that was found. They are to be told this one."""
    answered: frozenset[str] = frozenset()
    """Ids of requests before that end that are finished, though this does not say so."""

    def mark_answered(self, delivery: Delivery) -> Delivery:
        """Return a delivery of the partition, which says if its request had a result when a commit was forgotten."""
        is_answered = delivery.offset[1] < self.forgotten_end and delivery.key in self.answered
        return replace(delivery, since_result_s=0.0) if is_answered else delivery


class PartitionOffsets:
    """Delivered and finished offsets of one partition, from the committed offset on."""

    def __init__(self, committed: int, metadata: str = "", epoch: int = NO_EPOCH, forgotten_end: int = 0) -> None:
        """Begin at a committed offset. `epoch` is the leader epoch of the commit, or `NO_EPOCH`. For `forgotten_end`
        see `StartPosition`.
        """
        self._epoch, self._forgotten_end = epoch, forgotten_end
        self._last_epoch: int | None = None
        """The leader epoch of what was read last; None before anything was."""
        self._next = committed  # the offset after the last delivered
        self._unfinished: dict[int, None] = {}  # in delivery order, so ascending
        self._finished: list[Range] = [run for run in decode_ranges(metadata, committed) if run[0] >= committed]

    @property
    def next_offset(self) -> int:
        """The offset at which the partition is read next."""
        return self._next

    @property
    def num_unfinished(self) -> int:
        """How many offsets are delivered and not finished."""
        return len(self._unfinished)

    @property
    def window_usage(self) -> float:
        """The share of the allowed distance beyond the first unfinished offset that is read. At 1 reading has to wait.

        The metadata has at most one run more than there are unfinished offsets, of two numbers each. A number takes a
        byte, and one more for each 127 offsets that it spans, at most.
        """
        ahead = self._next - next(iter(self._unfinished), self._next)
        return max(ahead / MAX_OFFSETS_AHEAD, (2 * (len(self._unfinished) + 1) + ahead // 127) / _ALLOWED_BYTES)

    def skip_to(self, end: int) -> bool:
        """Note that the log has no more messages before `end`. Return whether that was unknown."""
        if end <= self._next:
            return False
        self._finished = _merge_ranges([*self._finished, (self._next, end - 1)])
        self._next, self._last_epoch = end, NO_EPOCH  # what is left out may be of a later epoch than what is before it
        return True

    def skip_deleted(self, begin: int) -> int:
        """Note that the log begins at `begin`. Return how many offsets before it were neither read nor finished."""
        first = self._next
        done = sum(min(high, begin - 1) + 1 - low for low, high in self._finished if first <= low < begin)
        return begin - first - done if self.skip_to(begin) else 0

    def note_delivered(self, offset: int, epoch: int = NO_EPOCH) -> bool:
        """Note that the message at `offset` was read. Return False if its work was finished before a restart.

        `epoch` is the leader epoch under which the message was written, if it is known.
        """
        if offset < self._next:
            return False
        if epoch > self._epoch > NO_EPOCH:
            # What the commit calls finished was written before this message. So the log was cut below it since, and has
            # grown again: from here on these offsets are other messages'.
            self._finished = [(low, min(high, offset - 1)) for low, high in self._finished if low < offset]
        self.skip_to(offset)
        self._next, self._last_epoch = offset + 1, epoch
        if is_in_ranges(self._finished, offset):
            return False
        self._unfinished[offset] = None
        return True

    @property
    def commit_epoch(self) -> int:
        """The leader epoch of the newest of all that a commit calls finished, or `NO_EPOCH`.

        With one that is too low, the next reader would believe that the log was cut since. Epochs grow with the offset:
        what was read last has the newest, unless the commit that was begun with knows of finished offsets behind it.
        """
        if self._last_epoch is None:
            return self._epoch
        if not self._finished or self._finished[-1][1] < self._next:
            return self._last_epoch
        return NO_EPOCH if NO_EPOCH in (self._epoch, self._last_epoch) else max(self._epoch, self._last_epoch)

    def is_unfinished(self, offset: int) -> bool:
        """Return whether the offset was delivered and is not finished."""
        return offset in self._unfinished

    def build_commit(self, also: Collection[int] = ()) -> tuple[int, str]:
        """Return offset and metadata to commit, as if the offsets in `also` were finished too. Change nothing."""
        first = next((offset for offset in self._unfinished if offset not in also), self._next)
        beyond = _merge_ranges([*self._finished, *((offset, offset) for offset in also)])
        ranges = encode_ranges([(max(low, first), high) for low, high in beyond if high >= first], first)
        if self._forgotten_end <= first:
            return first, ranges
        return first, f"{ranges or _PREFIX}{_FORGOTTEN}{self._forgotten_end}"

    def finish_offsets(self, offsets: Iterable[int]) -> None:
        """Note that the work of these delivered offsets is done, and committed or about to be."""
        done = list(offsets)
        for offset in done:
            del self._unfinished[offset]
        first = next(iter(self._unfinished), self._next)
        runs = _merge_ranges([*self._finished, *((offset, offset) for offset in done)])
        self._finished = [run for run in runs if run[1] >= first]

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the parts contradict each other."""
        assert list(self._unfinished) == sorted(self._unfinished)
        assert all(offset < self._next for offset in self._unfinished)
        assert all(low <= high for low, high in self._finished)
        assert all(a[1] + 1 < b[0] for a, b in zip(self._finished, self._finished[1:], strict=False))
        assert not any(is_in_ranges(self._finished, offset) for offset in self._unfinished)


def encode_ranges(runs: Iterable[Range], base: int) -> str:
    """Return ascending, separate runs at or after `base` as text of at most `MAX_METADATA_BYTES`.

    Runs that do not fit are left out, from the far end: their work may be done twice.
    """
    packed = bytearray()
    end = base
    for low, high in runs:
        step = _encode_varint(low - end) + _encode_varint(high - low)
        if len(_PREFIX) + (len(packed) + len(step) + 2) // 3 * 4 > MAX_METADATA_BYTES:
            break
        packed += step
        end = high
    return _PREFIX + base64.b64encode(packed).decode() if packed else ""


def decode_ranges(text: str | None, base: int) -> list[Range]:
    """Return the runs in a commit's metadata. Foreign or damaged text has none, so that work is repeated."""
    if not text or not text.startswith(_PREFIX):
        return []
    try:
        packed = base64.b64decode(text[len(_PREFIX) :].partition(_FORGOTTEN)[0], validate=True)
    except (binascii.Error, ValueError):
        return []
    numbers = _decode_varints(packed)
    if numbers is None or len(numbers) % 2:
        return []
    runs: list[Range] = []
    end = base
    for skip, length in zip(numbers[::2], numbers[1::2], strict=True):
        low = end + skip
        end = low + length
        runs.append((low, end))
    return _merge_ranges(runs)


def decode_forgotten_end(text: str) -> int:
    """Return the end of the log when a commit was found to be forgotten, by a later one's metadata; else 0."""
    end = text.partition(_FORGOTTEN)[2] if text.startswith(_PREFIX) else ""
    return int(end) if end.isdecimal() else 0


def _encode_varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _decode_varints(packed: bytes) -> list[int] | None:
    numbers: list[int] = []
    number = shift = 0
    for byte in packed:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
        elif shift > 63:
            return None
    return numbers if shift == 0 else None


def _merge_ranges(runs: list[Range]) -> list[Range]:
    """Return the offsets of the runs as ascending runs that neither overlap nor touch."""
    merged: list[Range] = []
    for low, high in sorted(runs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def is_in_ranges(runs: list[Range], offset: int) -> bool:
    """Return whether ascending, separate runs have an offset."""
    at = bisect_right(runs, (offset, float("inf"))) - 1
    return at >= 0 and runs[at][0] <= offset <= runs[at][1]
