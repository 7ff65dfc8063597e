"""The blocks of one Redis server, read and written in batches.

Reading: 1. GETs are sent in a pipeline, the next ones before the last replies are read. 2. Each block is received into
its target and checked. 3. The index records the used blocks and renews their time; damaged blocks are deleted.

Writing: 1. The index says which blocks are stored already. 2. The index reserves space for the others and names the
blocks to evict (`take.lua`). 3. Evicted blocks are deleted. 4. The new blocks are written, each with its checksum.
5. Blocks that could not be written leave the index again.

| A crash after | Leaves                                | Until                                                     |
|---------------|---------------------------------------|-----------------------------------------------------------|
| reading 1, 2  | an order of use that is a little old  |                                                           |
| writing 2     | blocks that are not in the index      | their time is over, or a use adds them to the index       |
| writing 2 - 4 | index entries without blocks          | a reader does not find the block, or their time is over   |

Between writing 2 and 3, or while a block is read and found damaged, another process may have stored the same block
again, or found it, and leased it. A leased block is then deleted all the same. It is a miss and computed again; never a
wrong block.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from penstock.kvstore.block import HEADER_BYTES, RAW, Block, BlockFormat, ReadOutcome, ReadRequest
from penstock.kvstore.copying import compute_checksum
from penstock.kvstore.tiers.contract import TierCounters
from penstock.kvstore.tiers.index import MAX_SCRIPT_KEYS, BlockUses, RedisIndex
from penstock.kvstore.tiers.receive import receive_block
from penstock.kvstore.tiers.server import KVServer
from penstock.kvstore.tiers.wire import Buffer, ErrorReply, RespConnection, UnexpectedReply, encode_command
from penstock.names import kv_key

if TYPE_CHECKING:
    from penstock.kvstore.codec import TierCodecs

T = TypeVar("T")

MAX_BATCH_BYTES = 8 * 2**20
"""About the most bytes that are read or written at once. A long prompt must not hold up the server's other clients."""

EncodedBlock = tuple[Block, int, Buffer]
"""A block, the number of a codec, and the content that the codec made of the payload."""


class RedisNode:
    """The blocks of one server. No method raises if the server fails: the call does less, and counts as an error."""

    def __init__(self, server: KVServer, form: BlockFormat, index: RedisIndex, codec: "TierCodecs | None") -> None:
        self._server, self._form, self._index, self._codec = server, form, index, codec
        self._max_pipelined_reads = max(
            2, min(MAX_SCRIPT_KEYS, MAX_BATCH_BYTES // (HEADER_BYTES + form.payload_bytes) // server.num_lanes)
        )

    def call_index(self, call: Callable[[RespConnection, RedisIndex], T], counters: TierCounters) -> T | None:
        """Return what `call` returns, or None if the server failed."""
        return self._server.call(lambda wire: call(wire, self._index), counters)

    def close(self) -> None:
        """Close the connections to the server."""
        self._server.close()

    def get(self, requests: Sequence[ReadRequest], counters: TierCounters) -> list[bool]:
        """Implement `Tier.get`."""
        found = [False] * len(requests)
        lanes = min(self._server.num_lanes, len(requests))
        self._server.call_on_connections(
            lanes, lambda wires: self._read_blocks(wires, requests, found, counters), counters
        )
        counters.hits += sum(found)
        counters.misses += len(found) - sum(found)
        counters.bytes_read += sum(found) * self._form.payload_bytes
        return found

    def put(self, blocks: Sequence[Block], counters: TierCounters) -> list[bool]:
        """Implement `Tier.put`."""
        stored: set[bytes] = set()
        self._server.call(lambda wire: self._write_blocks(wire, blocks, stored, counters), counters)
        return [block.key.hash in stored for block in blocks]

    def has_blocks(self, keys: Sequence[bytes], counters: TierCounters) -> list[bool]:
        """Implement `Tier.has_blocks`."""

        def look_up(wire: RespConnection) -> list[bool]:
            sizes = _read_sizes(wire, keys)
            gone = self._index.record_uses(wire, BlockUses(sizes, [key for key in keys if key not in sizes]), counters)
            return [key in sizes and key not in gone for key in keys]

        return self._server.call(look_up, counters) or [False] * len(keys)

    def _read_blocks(
        self,
        wires: Sequence[RespConnection],
        requests: Sequence[ReadRequest],
        found: list[bool],
        counters: TierCounters,
    ) -> None:
        """Read the blocks over n connections in turn, a chunk at a time; each reads every n-th block."""
        results: dict[int, tuple[ReadOutcome, int]] = {}
        lanes = [
            self._read_lane(wire, requests, range(start, len(requests), len(wires)), found, results)
            for start, wire in enumerate(wires)
        ]
        started_s = time.perf_counter()
        try:
            while lanes:
                lanes = [lane for lane in lanes if next(lane, self) is None]
        finally:
            counters.damaged += sum(outcome is ReadOutcome.DAMAGED for outcome, _ in results.values())
        lengths = [length for outcome, length in results.values() if outcome is ReadOutcome.WHOLE]
        if all(length == HEADER_BYTES + self._form.payload_bytes for length in lengths):  # else decoding took time, too
            self._record_transfer(sum(lengths), started_s)
        uses = BlockUses()
        for index, request in enumerate(requests):
            outcome, length = results[index]
            if outcome is ReadOutcome.WHOLE:
                uses.sizes[request.key.hash] = length
            else:
                (uses.absent if outcome is ReadOutcome.MISSING else uses.damaged).append(request.key.hash)
        self._index.record_uses(wires[0], uses, counters)

    def _read_lane(
        self,
        wire: RespConnection,
        requests: Sequence[ReadRequest],
        indices: Sequence[int],
        found: list[bool],
        results: dict[int, tuple[ReadOutcome, int]],
    ) -> Iterator[None]:
        """Read the blocks `indices` over one connection, with a pause after each chunk."""
        asked = 0
        for done, index in enumerate(indices):
            if asked < len(indices) and asked - done <= self._max_pipelined_reads // 2:
                part = indices[asked : done + self._max_pipelined_reads]
                wire.send([b"".join(encode_command("GET", kv_key(requests[i].key.hash)) for i in part)])
                asked = done + self._max_pipelined_reads
            results[index] = yield from receive_block(wire, self._form, requests[index], self._codec)
            found[index] = results[index][0] is ReadOutcome.WHOLE

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
        """Do steps 2 to 5 of writing."""
        sizes = [(block.key.hash, HEADER_BYTES + len(content)) for block, _, content in batch]
        reservation = self._index.reserve_blocks(wire, sizes, counters)
        stored -= reservation.deleted
        sent, failed, refusal, started_s = list[bytes](), list[bytes](), None, time.perf_counter()
        for (block, number, content), ok in zip(batch, reservation.accepted, strict=True):
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
        self._record_transfer(sum(size for key, size in sizes if key in done), started_s)
        self._index.forget_unwritten(wire, failed, reservation.clock)
        if refusal is not None:
            raise refusal

    def _record_transfer(self, num_bytes: int, started_s: float) -> None:
        """Record how long a transfer took. Codecs use it to decide whether compression is worthwhile."""
        if self._codec is not None:
            self._codec.record_transfer(num_bytes, time.perf_counter() - started_s)

    def _encode_set_command(self, block: Block, number: int, content: Buffer) -> list[Buffer]:
        """Return the command that stores a block; nothing, if its memory does not hold the block any more."""
        header = self._form.make_header(block.key, compute_checksum(content), number, len(content))
        if not block.is_valid():
            return []
        key, keep = kv_key(block.key.hash).encode(), b"%d" % self._index.keep_ms
        begin = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, HEADER_BYTES + len(content))
        return [begin + header.pack(), content, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(keep), keep)]


def _read_sizes(wire: RespConnection, keys: Sequence[bytes]) -> dict[bytes, int]:
    """Return the stored bytes of each key that exists."""
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
