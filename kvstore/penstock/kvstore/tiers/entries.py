"""List the index of one Redis server, in steps that do not hold up the server's other clients."""

import json
from collections.abc import Iterator
from functools import partial

from penstock.kvstore.tiers.address import RedisNode
from penstock.kvstore.tiers.contract import TierCounters, TierEntry
from penstock.kvstore.tiers.index import MAX_SCRIPT_KEYS, RedisIndex, read_page, read_replies
from penstock.kvstore.tiers.wire import Reply, RespConnection, UnexpectedReply, encode_command
from penstock.names import KV_INDEX

USED, HELD, SIZES, LEASES, _, _ = KV_INDEX


def list_node_entries(address: RedisNode, counters: TierCounters) -> Iterator[TierEntry]:
    """Yield the entries of one server for `Tier.list_entries`. Stop early if the server does not answer."""
    seen: set[bytes] = set()
    for part in (HELD, USED):
        cursor = b"0"
        while True:
            chunk = address.call_index(partial(_read_entries, part, cursor), counters)
            if chunk is None:
                return
            cursor, found = chunk
            yield from (entry for entry in found if entry.key not in seen)
            seen.update(entry.key for entry in found)
            if cursor == b"0":
                break


def _read_entries(part: str, cursor: bytes, wire: RespConnection, _: RedisIndex) -> tuple[bytes, list[TierEntry]]:
    """Return the cursor of the next step, and some entries of a part of the index."""
    wire.send([encode_command("ZSCAN", part, cursor, "COUNT", MAX_SCRIPT_KEYS), encode_command("TIME")])
    cursor, found = read_page(wire)
    (time,) = read_replies(wire, 1)
    keys, used = found[::2], found[1::2]
    if not keys:
        return cursor, []
    wire.send([encode_command("HMGET", SIZES, *keys), encode_command("HMGET", LEASES, *keys)])
    sizes, leases = read_replies(wire, 2)
    match time, sizes, leases:
        case [bytes(seconds), bytes(micros)], list(), list():
            now = int(seconds) * 1000 + int(micros) // 1000
            return cursor, [
                TierEntry(key, int(size), float(score) / 1e6, _count_leases(owners, now))
                for key, score, size, owners in zip(keys, used, sizes, leases, strict=True)
                if isinstance(size, bytes)
            ]
    raise UnexpectedReply(f"not what was asked: {sizes!r}"[:200])


def _count_leases(owners: Reply, now: int) -> int:
    """Return how many leases have not run out."""
    ends = json.loads(owners) if isinstance(owners, bytes) else {}
    return sum(end > now for end in ends.values())
