"""The index of one Redis server's blocks: order of use, sizes, leases. It is changed by scripts alone.

Methods work on a connection, and raise what the connection raises.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from penstock.kvstore.tiers.contract import TierCounters, TierUsage
from penstock.kvstore.tiers.wire import ErrorReply, Reply, RespConnection, UnexpectedReply, encode_command
from penstock.names import KV_INDEX, kv_key
from penstock.redis.scripts import Script, load_script

TAKE = load_script("penstock.kvstore.tiers", "index", "take")
DROP = load_script("penstock.kvstore.tiers", "index", "drop")
LEASE = load_script("penstock.kvstore.tiers", "index", "lease")
RELEASE = load_script("penstock.kvstore.tiers", "index", "release")
RETAIN = load_script("penstock.kvstore.tiers", "index", "retain")
USAGE = load_script("penstock.kvstore.tiers", "index", "usage")
CHECK = load_script("penstock.kvstore.tiers", "index", "check")
SCRIPTS = (TAKE, DROP, LEASE, RELEASE, RETAIN, USAGE, CHECK)
"""All scripts. A connection loads them into the server when it is opened."""

MAX_SCRIPT_KEYS = 256
"""Most keys in one call of a script."""
WRITE_GRACE_MS = 10_000
"""An entry without a block is kept for this long, as its block may be being written."""


@dataclass
class BlockUses:
    """Keys that a call found, missed, or found damaged."""

    sizes: dict[bytes, int] = field(default_factory=dict)
    """Bytes of each block that is there, by key."""
    absent: list[bytes] = field(default_factory=list)
    damaged: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Reservation:
    """Answer of the index to a request for space."""

    accepted: list[bool]
    deleted: set[bytes]
    """Keys of the blocks that are evicted."""
    clock: int
    """Time of the reservation, by the index's clock."""


@dataclass(frozen=True)
class RedisIndex:
    """The index of one server. With a budget and a time of 0 the values set last stay, and uses are not recorded."""

    budget_bytes: int
    keep_ms: int

    def record_uses(self, wire: RespConnection, uses: BlockUses, counters: TierCounters) -> set[bytes]:
        """Record that blocks were used now, and delete damaged ones. Return the keys of all blocks that were deleted.

        A block that is not in the index is added, and blocks that are evicted for it are deleted. These may be among
        the blocks used.
        """
        gone: set[bytes] = set()
        if not self.keep_ms:
            return gone
        pairs = list(uses.sizes.items())
        for start in range(0, max(len(pairs), len(uses.absent)), MAX_SCRIPT_KEYS):
            part = [pair for pair in pairs[start : start + MAX_SCRIPT_KEYS] if pair[0] not in gone]
            renew = [encode_command("PEXPIRE", kv_key(key), self.keep_ms, "GT") for key, _ in part]
            wire.send([self._take_command(part, uses.absent[start : start + MAX_SCRIPT_KEYS]), *renew])
            reservation = self._read_reservation(wire, counters)
            read_replies(wire, len(renew))
            deleted = reservation.deleted | {
                key for (key, _), ok in zip(part, reservation.accepted, strict=True) if not ok
            }
            self._unlink_blocks(wire, deleted)
            gone |= deleted
        self.delete_blocks(wire, uses.damaged)
        return gone.union(uses.damaged)

    def reserve_blocks(
        self, wire: RespConnection, pairs: Sequence[tuple[bytes, int]], counters: TierCounters
    ) -> Reservation:
        """Reserve space for at most `MAX_SCRIPT_KEYS` blocks (key, bytes). Blocks evicted for them are deleted."""
        wire.send([self._take_command(pairs, [])])
        reservation = self._read_reservation(wire, counters)
        self._unlink_blocks(wire, reservation.deleted)
        counters.refused += len(reservation.accepted) - sum(reservation.accepted)
        return reservation

    def forget_unwritten(self, wire: RespConnection, keys: Sequence[bytes], clock: int) -> None:
        """Remove blocks (at most `MAX_SCRIPT_KEYS`) that were not written after their space was reserved at `clock`.

        An entry that another process has used since then stays.
        """
        if keys:
            wire.send([self._script_command(DROP, clock, *keys)])
            read_replies(wire, 1)

    def delete_blocks(self, wire: RespConnection, keys: Sequence[bytes]) -> int:
        """Delete blocks, and forget them; how many were there."""
        count = 0
        for start in range(0, len(keys), MAX_SCRIPT_KEYS):
            part = keys[start : start + MAX_SCRIPT_KEYS]
            wire.send([*_unlink_commands(part), self._script_command(DROP, 0, *part)])
            count += sum(parse_numbers(read_replies(wire, len(part))))
            read_replies(wire, 1)
        return count

    def lease_blocks(self, wire: RespConnection, owner: str, keys: Sequence[bytes], ms: int) -> None:
        """Implement `Tier.lease_blocks`. The blocks do not expire before the lease."""
        for start in range(0, len(keys), MAX_SCRIPT_KEYS):
            part = keys[start : start + MAX_SCRIPT_KEYS]
            renew = [encode_command("PEXPIRE", kv_key(key), ms, "GT") for key in part]
            wire.send([self._script_command(LEASE, owner, ms, *part), *renew])
            read_replies(wire, 1 + len(part))

    def release_leases(self, wire: RespConnection, owner: str, keys: Sequence[bytes]) -> None:
        """Implement `Tier.release_leases`."""
        for start in range(0, len(keys), MAX_SCRIPT_KEYS):
            part = keys[start : start + MAX_SCRIPT_KEYS]
            wire.send([self._script_command(RELEASE, owner, *part)])
            read_replies(wire, 1)

    def retain_blocks(self, wire: RespConnection, keys: Sequence[bytes], ms: int) -> list[bool]:
        """Implement `Tier.retain_blocks`. The blocks do not expire before the retention ends."""
        here: list[bool] = []
        for start in range(0, len(keys), MAX_SCRIPT_KEYS):
            part = keys[start : start + MAX_SCRIPT_KEYS]
            renew = [encode_command("PEXPIRE", kv_key(key), ms, "GT") for key in part if ms]
            wire.send([self._script_command(RETAIN, ms, *part), *renew])
            (reply, *_) = read_replies(wire, 1 + len(renew))
            if not isinstance(reply, list):
                raise UnexpectedReply(f"not a reply of the script: {reply!r}")
            here += [found == 1 for found in parse_numbers(reply)]
        return here

    def read_usage(self, wire: RespConnection) -> TierUsage:
        """Implement `Tier.read_usage`."""
        wire.send([self._script_command(USAGE)])
        (reply,) = read_replies(wire, 1)
        if not isinstance(reply, list) or len(reply) != 5:
            raise UnexpectedReply(f"not a reply of the script: {reply!r}")
        return TierUsage(*parse_numbers(reply))

    def check_integrity(self, wire: RespConnection) -> list[str]:
        """Return problems of the index, and blocks that would never expire. Reads everything."""
        wire.send([self._script_command(CHECK)])
        (wrong,) = read_replies(wire, 1)
        found = [str(line) for line in wrong] if isinstance(wrong, list) else [f"no list: {wrong!r}"]
        cursor = b"0"
        while True:
            wire.send([encode_command("SCAN", cursor, "MATCH", kv_key(b"") + "*", "COUNT", MAX_SCRIPT_KEYS)])
            cursor, keys = read_page(wire)
            wire.send([encode_command("PTTL", key) for key in keys])
            found += [
                f"{key!r} stays for ever"
                for key, ttl in zip(keys, read_replies(wire, len(keys)), strict=True)
                if ttl == -1
            ]
            if cursor == b"0":
                return found

    def _script_command(self, script: Script, *args: bytes | str | int) -> bytes:
        """Return the command that runs a script on the index."""
        return encode_command(*script.command(KV_INDEX, [self.budget_bytes, self.keep_ms, *args]))

    def _take_command(self, pairs: Sequence[tuple[bytes, int]], absent: Sequence[bytes]) -> bytes:
        words = [word for pair in pairs for word in pair]
        return self._script_command(TAKE, WRITE_GRACE_MS, len(pairs), *words, *absent)

    def _read_reservation(self, wire: RespConnection, counters: TierCounters) -> Reservation:
        """Read the reply to `_take_command`."""
        (reply,) = read_replies(wire, 1)
        match reply:
            case [list(taken), list(evicted), list(expired), int(clock)]:
                counters.evictions += len(evicted)
                gone = {key for key in (*evicted, *expired) if isinstance(key, bytes)}
                return Reservation([ok == 1 for ok in parse_numbers(taken)], gone, clock)
        raise UnexpectedReply(f"not a reply of the script: {reply!r}")

    @staticmethod
    def _unlink_blocks(wire: RespConnection, keys: Iterable[bytes]) -> None:
        rest = iter(keys)
        while part := list(islice(rest, MAX_SCRIPT_KEYS)):
            wire.send(_unlink_commands(part))
            read_replies(wire, len(part))


def _unlink_commands(keys: Sequence[bytes]) -> list[bytes]:
    return [encode_command("UNLINK", kv_key(key)) for key in keys]


def read_page(wire: RespConnection) -> tuple[bytes, list[bytes]]:
    """Read the reply to one step of a SCAN. Return the next cursor (`0`: done) and the keys found."""
    (reply,) = read_replies(wire, 1)
    match reply:
        case [bytes(cursor), list(found)]:
            return cursor, [item for item in found if isinstance(item, bytes)]
    raise UnexpectedReply(f"not what a SCAN is answered: {reply!r}"[:200])


def read_replies(wire: RespConnection, count: int) -> list[Reply]:
    """Return the next `count` replies. Raise `ErrorReply` for the first that is one."""
    found: list[Reply] = []
    for _ in range(count):
        reply = wire.read_reply()
        if isinstance(reply, ErrorReply):
            raise reply
        found.append(reply)
    return found


def parse_numbers(found: Sequence[Reply]) -> list[int]:
    """Return replies that must be numbers. Raise `UnexpectedReply` for others."""
    counts = [reply for reply in found if isinstance(reply, int)]
    if len(counts) != len(found):
        raise UnexpectedReply(f"not numbers: {found!r}"[:200])
    return counts
