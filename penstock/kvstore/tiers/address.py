"""The blocks of one Redis server, read and written in batches.

Reading: 1. GETs go out in a pipeline, the next ones before the last replies are read; 2. each block is received where
it is wanted and checked; 3. the index is told which were used, their time is renewed, what is damaged is deleted.

Writing: 1. ask which are there already; 2. the index makes room and names what goes for it (`take.lua`); 3. that is
deleted; 4. blocks are written, each with its checksum; 5. those that were not are out of the index again.

| A crash after | Leaves                                | Until                                              |
|---------------|---------------------------------------|----------------------------------------------------|
| reading 1, 2  | an order of use that is a little old  |                                                    |
| writing 2     | blocks that the index does not know   | their time is over, or they are used and taken in  |
| writing 2 - 4 | entries without blocks                | somebody does not find one, or their time is over  |

What one deletes, another may have stored anew, or found, and leased, since it was named: between writing 2 and 3, or
while it was read and found damaged. Then a leased block is a miss all the same, and computed again; never a wrong one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from penstock.kvstore.block import HEADER_BYTES, RAW, Block, BlockFormat, ReadRequest
from penstock.kvstore.copying import compute_checksum
from penstock.kvstore.tiers.contract import TierCounters
from penstock.kvstore.tiers.index import MAX_SCRIPT_KEYS, BlockUses, RedisIndex
from penstock.kvstore.tiers.receive import Found, receive_block
from penstock.kvstore.tiers.server import KVServer
from penstock.kvstore.tiers.wire import Buffer, ErrorReply, RespConnection, UnexpectedReply, encode_command
from penstock.names import kv_key

if TYPE_CHECKING:
    from penstock.kvstore.codec import TierCodecs

T = TypeVar("T")

MAX_BATCH_BYTES = 8 * 2**20
"""About so much is asked for or written at once: a long prompt does not hold up the server's other clients."""

EncodedBlock = tuple[Block, int, Buffer]
"""A block, and its payload as the codec of that number wrote it."""


class RedisNode:
    """One server. Nothing here raises for it: a call that failed did less, and is counted as an error."""

    def __init__(self, server: KVServer, form: BlockFormat, index: RedisIndex, codec: "TierCodecs | None") -> None:
        self._server, self._form, self._index, self._codec = server, form, index, codec
        self._max_pipelined_reads = max(
            2, min(MAX_SCRIPT_KEYS, MAX_BATCH_BYTES // (HEADER_BYTES + form.payload_bytes) // server.num_lanes)
        )

    def call_index(self, call: Callable[[RespConnection, RedisIndex], T], counters: TierCounters) -> T | None:
        """What `call` returns, or None if the server did not do it."""
        return self._server.call(lambda wire: call(wire, self._index), counters)

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def get(self, wanted: Sequence[ReadRequest], counters: TierCounters) -> list[bool]:
        """See `Tier.get`."""
        found = [False] * len(wanted)
        lanes = min(self._server.num_lanes, len(wanted))
        self._server.call_on_connections(
            lanes, lambda wires: self._read_blocks(wires, wanted, found, counters), counters
        )
        counters.hits += sum(found)
        counters.misses += len(found) - sum(found)
        counters.bytes_read += sum(found) * self._form.payload_bytes
        return found

    def put(self, blocks: Sequence[Block], counters: TierCounters) -> list[bool]:
        """See `Tier.put`."""
        stored: set[bytes] = set()
        self._server.call(lambda wire: self._write_blocks(wire, blocks, stored, counters), counters)
        return [block.key.hash in stored for block in blocks]

    def has_blocks(self, keys: Sequence[bytes], counters: TierCounters) -> list[bool]:
        """See `Tier.has`."""

        def look(wire: RespConnection) -> list[bool]:
            sizes = _read_sizes(wire, keys)
            gone = self._index.record_uses(wire, BlockUses(sizes, [key for key in keys if key not in sizes]), counters)
            return [key in sizes and key not in gone for key in keys]

        return self._server.call(look, counters) or [False] * len(keys)

    def _read_blocks(
        self, wires: Sequence[RespConnection], wanted: Sequence[ReadRequest], found: list[bool], counters: TierCounters
    ) -> None:
        """Each connection has every so-manieth block; a piece is received from each in turn."""
        results: dict[int, tuple[Found, int]] = {}
        lanes = [
            self._read_lane(wire, wanted, range(start, len(wanted), len(wires)), found, results)
            for start, wire in enumerate(wires)
        ]
        begun = time.perf_counter()
        try:
            while lanes:
                lanes = [lane for lane in lanes if next(lane, self) is None]
        finally:
            counters.damaged += sum(kind is Found.DAMAGED for kind, _ in results.values())
        lengths = [length for kind, length in results.values() if kind is Found.WHOLE]
        if all(length == HEADER_BYTES + self._form.payload_bytes for length in lengths):  # else decoding took time, too
            self._record_transfer(sum(lengths), begun)
        uses = BlockUses()
        for index, want in enumerate(wanted):
            kind, length = results[index]
            if kind is Found.WHOLE:
                uses.sizes[want.key.hash] = length
            else:
                (uses.absent if kind is Found.NOTHING else uses.damaged).append(want.key.hash)
        self._index.record_uses(wires[0], uses, counters)

    def _read_lane(
        self,
        wire: RespConnection,
        wanted: Sequence[ReadRequest],
        indices: Sequence[int],
        found: list[bool],
        results: dict[int, tuple[Found, int]],
    ) -> Iterator[None]:
        """Read the blocks `indices` over one connection, with a pause after each piece."""
        asked = 0
        for done, index in enumerate(indices):
            if asked < len(indices) and asked - done <= self._max_pipelined_reads // 2:
                part = indices[asked : done + self._max_pipelined_reads]
                wire.send([b"".join(encode_command("GET", kv_key(wanted[i].key.hash)) for i in part)])
                asked = done + self._max_pipelined_reads
            results[index] = yield from receive_block(wire, self._form, wanted[index], self._codec)
            found[index] = results[index][0] is Found.WHOLE

    def _write_blocks(
        self, wire: RespConnection, blocks: Sequence[Block], stored: set[bytes], counters: TierCounters
    ) -> None:
        sizes = _read_sizes(wire, [block.key.hash for block in blocks])
        gone = self._index.record_uses(wire, BlockUses(sizes), counters)
        stored.update(sizes.keys() - gone)
        counters.refused += len(sizes.keys() & gone)
        batch, total = list[EncodedBlock](), 0
        for block in {block.key.hash: block for block in blocks if block.key.hash not in sizes}.values():
            number, content = self._encode_block(block)
            batch.append((block, number, content))
            total += HEADER_BYTES + len(content)
            if total >= MAX_BATCH_BYTES or len(batch) == MAX_SCRIPT_KEYS:
                self._write_batch(wire, batch, stored, counters)
                batch, total = [], 0
        if batch:
            self._write_batch(wire, batch, stored, counters)

    def _encode_block(self, block: Block) -> tuple[int, Buffer]:
        if self._codec is None:
            return RAW, block.payload
        return self._codec.encode_payload(block.payload)

    def _write_batch(
        self, wire: RespConnection, batch: Sequence[EncodedBlock], stored: set[bytes], counters: TierCounters
    ) -> None:
        """Steps 2 to 5."""
        sizes = [(block.key.hash, HEADER_BYTES + len(content)) for block, _, content in batch]
        room = self._index.reserve_blocks(wire, sizes, counters)
        stored -= room.deleted
        sent, failed, refusal, begun = list[bytes](), list[bytes](), None, time.perf_counter()
        for (block, number, content), ok in zip(batch, room.accepted, strict=True):
            if ok:
                parts = self._encode_set_command(block, number, content)
                wire.send(parts)
                (sent if parts else failed).append(block.key.hash)
        for key in sent:
            reply = wire.read_reply()
            if reply == b"OK":
                stored.add(key)
                counters.bytes_written += self._form.payload_bytes
            elif isinstance(reply, ErrorReply):
                refusal = reply
                failed.append(key)
            else:
                raise UnexpectedReply(f"not what a SET is answered: {reply!r}")
        done = set(sent)
        self._record_transfer(sum(size for key, size in sizes if key in done), begun)
        self._index.forget_unwritten(wire, failed, room.clock)
        if refusal is not None:
            raise refusal

    def _record_transfer(self, num_bytes: int, begun: float) -> None:
        """So many bytes came or went since then: the codecs decide by that what pays."""
        if self._codec is not None:
            self._codec.record_transfer(num_bytes, time.perf_counter() - begun)

    def _encode_set_command(self, block: Block, number: int, content: Buffer) -> list[Buffer]:
        """The command that stores a block; nothing, if its memory holds something else by now."""
        header = self._form.make_header(block.key, compute_checksum(content), number, len(content))
        if not block.is_valid():
            return []
        key, keep = kv_key(block.key.hash).encode(), b"%d" % self._index.keep_ms
        begin = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, HEADER_BYTES + len(content))
        return [begin + header.pack(), content, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(keep), keep)]


def _read_sizes(wire: RespConnection, keys: Sequence[bytes]) -> dict[bytes, int]:
    """How many bytes are there under each key, for those that are there."""
    sizes: dict[bytes, int] = {}
    for start in range(0, len(keys), MAX_SCRIPT_KEYS):
        part = keys[start : start + MAX_SCRIPT_KEYS]
        wire.send([b"".join(encode_command("STRLEN", kv_key(key)) for key in part)])
        for key in part:
            reply = wire.read_reply()
            if isinstance(reply, ErrorReply) and not str(reply).startswith("WRONGTYPE"):
                raise reply
            if isinstance(reply, int) and reply > 0:
                sizes[key] = reply
    return sizes
