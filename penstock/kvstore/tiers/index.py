"""What is known of the blocks of one Redis server: order of use, sizes, leases. Changed by scripts alone.

Every command but the scripts has one key, and the scripts' keys share a hash tag, so all of it fits a cluster. Methods
work on a connection and raise what it raises.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from penstock.kvstore.tiers.contract import TierCounters, TierUsage
from penstock.kvstore.tiers.wire import NotRedis, Refused, Reply, Wire, command
from penstock.names import KV_INDEX, kv_key
from penstock.redis.scripts import Script, load_script

TAKE = load_script("penstock.kvstore.tiers", "index", "take")
DROP = load_script("penstock.kvstore.tiers", "index", "drop")
LEASE = load_script("penstock.kvstore.tiers", "index", "lease")
RELEASE = load_script("penstock.kvstore.tiers", "index", "release")
USAGE = load_script("penstock.kvstore.tiers", "index", "usage")
CHECK = load_script("penstock.kvstore.tiers", "index", "check")
SCRIPTS = (TAKE, DROP, LEASE, RELEASE, USAGE, CHECK)
"""A connection sends their texts to the server as it opens."""

AT_ONCE = 256
"""Keys of one call of a script."""
GRACE_MS = 10_000
"""An entry without a block is left to its writer for this long."""


@dataclass
class Uses:
    """What a call found."""

    sizes: dict[bytes, int] = field(default_factory=dict)
    """Bytes of the blocks that are there."""
    absent: list[bytes] = field(default_factory=list)
    damaged: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Room:
    """What the index made of blocks that want to be in it."""

    taken: list[bool]
    gone: set[bytes]
    """What is deleted for them."""
    clock: int
    """When, by the index's clock."""


@dataclass(frozen=True)
class Index:
    """The index of one server. With a budget and a time of 0 those that were last set stand, and nothing is renewed."""

    budget: int
    keep_ms: int

    def note(self, wire: Wire, uses: Uses, counters: TierCounters) -> set[bytes]:
        """These blocks were used now. One that the index does not know is taken in; what goes for it, and what is
        damaged, is deleted. Returns what was: it may be of the very blocks.
        """
        gone: set[bytes] = set()
        if not self.keep_ms:
            return gone
        pairs = list(uses.sizes.items())
        for start in range(0, max(len(pairs), len(uses.absent)), AT_ONCE):
            part = [pair for pair in pairs[start : start + AT_ONCE] if pair[0] not in gone]
            renew = [command("PEXPIRE", kv_key(key), self.keep_ms, "GT") for key, _ in part]
            wire.send([self._take(part, uses.absent[start : start + AT_ONCE]), *renew])
            room = self._room(wire, counters)
            replies(wire, len(renew))
            out = room.gone | {key for (key, _), ok in zip(part, room.taken, strict=True) if not ok}
            self._unlink(wire, out)
            gone |= out
        self.delete(wire, uses.damaged)
        return gone.union(uses.damaged)

    def make_room(self, wire: Wire, pairs: Sequence[tuple[bytes, int]], counters: TierCounters) -> Room:
        """Room for at most `AT_ONCE` blocks (key, bytes): which may be written. What goes for them is deleted."""
        wire.send([self._take(pairs, [])])
        room = self._room(wire, counters)
        self._unlink(wire, room.gone)
        counters.refused += len(room.taken) - sum(room.taken)
        return room

    def forget(self, wire: Wire, keys: Sequence[bytes], clock: int) -> None:
        """Blocks (at most `AT_ONCE`) for which there was room at `clock` were not written. If somebody else wanted one
        since then, it is that one's now.
        """
        if keys:
            wire.send([self._call(DROP, clock, *keys)])
            replies(wire, 1)

    def delete(self, wire: Wire, keys: Sequence[bytes]) -> int:
        """Delete blocks, and forget them; how many were there."""
        count = 0
        for start in range(0, len(keys), AT_ONCE):
            part = keys[start : start + AT_ONCE]
            wire.send([*_unlinks(part), self._call(DROP, 0, *part)])
            count += sum(numbers(replies(wire, len(part))))
            replies(wire, 1)
        return count

    def lease(self, wire: Wire, owner: str, keys: Sequence[bytes], ms: int) -> None:
        """See `Tier.lease`. The time of the blocks does not end before the lease."""
        for start in range(0, len(keys), AT_ONCE):
            part = keys[start : start + AT_ONCE]
            renew = [command("PEXPIRE", kv_key(key), ms, "GT") for key in part]
            wire.send([self._call(LEASE, owner, ms, *part), *renew])
            replies(wire, 1 + len(part))

    def release(self, wire: Wire, owner: str, keys: Sequence[bytes]) -> None:
        """See `Tier.release`."""
        for start in range(0, len(keys), AT_ONCE):
            part = keys[start : start + AT_ONCE]
            wire.send([self._call(RELEASE, owner, *part)])
            replies(wire, 1)

    def usage(self, wire: Wire) -> TierUsage:
        """See `Tier.usage`."""
        wire.send([self._call(USAGE)])
        (reply,) = replies(wire, 1)
        if not isinstance(reply, list) or len(reply) != 4:
            raise NotRedis(f"not what the script says: {reply!r}")
        return TierUsage(*numbers(reply))

    def check(self, wire: Wire) -> list[str]:
        """What does not agree in the index, and blocks that would stay for ever; reads all there is."""
        wire.send([self._call(CHECK)])
        (wrong,) = replies(wire, 1)
        found = [str(line) for line in wrong] if isinstance(wrong, list) else [f"no list: {wrong!r}"]
        cursor = b"0"
        while True:
            wire.send([command("SCAN", cursor, "MATCH", kv_key(b"") + "*", "COUNT", AT_ONCE)])
            cursor, keys = page(wire)
            wire.send([command("PTTL", key) for key in keys])
            found += [
                f"{key!r} stays for ever" for key, ttl in zip(keys, replies(wire, len(keys)), strict=True) if ttl == -1
            ]
            if cursor == b"0":
                return found

    def _call(self, script: Script, *args: bytes | str | int) -> bytes:
        """Return the command that runs a script on the index."""
        return command(*script.command(KV_INDEX, [self.budget, self.keep_ms, *args]))

    def _take(self, pairs: Sequence[tuple[bytes, int]], absent: Sequence[bytes]) -> bytes:
        words = [word for pair in pairs for word in pair]
        return self._call(TAKE, GRACE_MS, len(pairs), *words, *absent)

    def _room(self, wire: Wire, counters: TierCounters) -> Room:
        """The reply to `_take`."""
        (reply,) = replies(wire, 1)
        match reply:
            case [list(taken), list(evicted), list(expired), int(clock)]:
                counters.evictions += len(evicted)
                gone = {key for key in (*evicted, *expired) if isinstance(key, bytes)}
                return Room([ok == 1 for ok in numbers(taken)], gone, clock)
        raise NotRedis(f"not what the script says: {reply!r}")

    @staticmethod
    def _unlink(wire: Wire, keys: Iterable[bytes]) -> None:
        rest = iter(keys)
        while part := list(islice(rest, AT_ONCE)):
            wire.send(_unlinks(part))
            replies(wire, len(part))


def _unlinks(keys: Sequence[bytes]) -> list[bytes]:
    return [command("UNLINK", kv_key(key)) for key in keys]


def page(wire: Wire) -> tuple[bytes, list[bytes]]:
    """The reply to one step of a SCAN: where to go on (`0`: done), and what it found."""
    (reply,) = replies(wire, 1)
    match reply:
        case [bytes(cursor), list(found)]:
            return cursor, [item for item in found if isinstance(item, bytes)]
    raise NotRedis(f"not what a SCAN is answered: {reply!r}"[:200])


def replies(wire: Wire, count: int) -> list[Reply]:
    """The next replies. Raises `Refused` for the first that is one."""
    found: list[Reply] = []
    for _ in range(count):
        reply = wire.reply()
        if isinstance(reply, Refused):
            raise reply
        found.append(reply)
    return found


def numbers(found: Sequence[Reply]) -> list[int]:
    """Replies that must be numbers."""
    counts = [reply for reply in found if isinstance(reply, int)]
    if len(counts) != len(found):
        raise NotRedis(f"not numbers: {found!r}"[:200])
    return counts
