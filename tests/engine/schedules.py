"""An engine without a model, for the scheduler's tests: each row of each block holds what its KV would depend on."""

import re
import struct
from collections.abc import Callable

from penstock.engine.memory.pool import BlockPool
from penstock.engine.memory.staging import BlockStaging, StagedPoolBlocks
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import Plan, Sequence, State
from penstock.names import CLASSES, PriorityClass
from tests.engine.helpers import make_block_keys, sequence

SIZE = 4
_ROW = struct.Struct("<q")


def seq_of(
    length: int,
    max_new_tokens: int = 4,
    *,
    priority_class: PriorityClass = "interactive",
    first: int = 0,
    tenant: str = "",
) -> Sequence:
    """Return a sequence with the prompt `first`, `first + 1` …"""
    prompt = list(range(first, first + length))
    return sequence(
        prompt, max_new_tokens, block_keys=make_block_keys(prompt, SIZE), priority_class=priority_class, tenant=tenant
    )


def make_block_kv(tokens: list[int], index: int) -> bytes:
    """Return the KV of a block of these tokens: each row is a hash of all tokens up to its own; zeros after them."""
    upto = range(index * SIZE + 1, min((index + 1) * SIZE, len(tokens)) + 1)
    return b"".join(_ROW.pack(hash(tuple(tokens[:end]))) for end in upto).ljust(SIZE * _ROW.size, b"\0")


class Blocks:
    """The bytes of a pool's blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._data = memoryview(bytearray(num_blocks * SIZE * _ROW.size))

    def allocate_views(self, blocks: list[int]) -> tuple[list[memoryview], None]:
        return [self[block] for block in blocks], None

    def commit_views(self, blocks: list[int], upload_buffer: None) -> None:
        """Do nothing: the views are the blocks themselves."""

    def view_block(self, block: int) -> memoryview:
        return self[block].toreadonly()

    def copy_block(self, block: int, num_rows: int) -> memoryview:
        return memoryview(bytes(self[block][: num_rows * _ROW.size]).ljust(SIZE * _ROW.size, b"\0"))

    def __getitem__(self, block: int) -> memoryview:
        return self._data[block * SIZE * _ROW.size : (block + 1) * SIZE * _ROW.size]

    def row(self, block: int, row: int) -> memoryview:
        return self[block][row * _ROW.size : (row + 1) * _ROW.size]


class ScheduledEngine:
    """A scheduler, and what an engine does around it, checked at every step. The token after n tokens is n."""

    def __init__(self, num_blocks: int = 100, *, budget: int = 100, max_batch: int = 8) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.scheduler = Scheduler(self.pool)
        self.blocks = Blocks(num_blocks)
        self.staging = BlockStaging(self.pool, self.blocks)
        self.budget, self.max_batch = budget, max_batch
        self.alive: list[Sequence] = []

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.scheduler.add_sequence(seq)
            self.alive.append(seq)

    def remove(self, seq: Sequence) -> None:
        self.scheduler.remove_sequence(seq)
        self.alive.remove(seq)

    def stage_blocks(self, keys: list[bytes]) -> StagedPoolBlocks:
        """Stage blocks as the engine does, and check that the reserved blocks stay free."""
        num_free, num_reserved = self.pool.num_free_blocks, self.scheduler.count_reserved_blocks(len(CLASSES) - 1)
        cached = self.pool.num_free_blocks - self.pool.count_free_blocks_besides(
            keys[: self.pool.count_cached_prefix(keys)]
        )
        staged = self.staging.stage_blocks(keys, num_reserved)
        assert self.pool.num_free_blocks >= min(num_reserved, num_free - cached)
        return staged

    def step(self) -> Plan:
        """Run one step, and remove the sequences that are done."""
        plan = self.scheduler.schedule(self.budget, self.max_batch)
        self.scheduler.check_integrity()
        assert len(plan) <= 1 or not any(seq.is_suspect for seq, _ in plan), "a suspect is computed alone"
        assert sum(num for _, num in plan) <= self.budget
        assert self.scheduler.num_running <= self.max_batch
        assert len({seq for seq, _ in plan}) == len(plan)
        for seq, num in plan:
            self._compute(seq, num)
        self.scheduler.check_integrity()
        for seq in [seq for seq in self.alive if seq.state is State.DONE]:
            self.remove(seq)
        self.scheduler.check_integrity()
        return plan

    def run(self, until: Callable[[], bool] = lambda: False, limit: int = 5000) -> int:
        """Step until nothing is left, or `until`; return the number of steps."""
        for num_steps in range(limit):
            if until() or not self.alive:
                return num_steps
            self.step()
        raise AssertionError(f"no end after {limit} steps: {self.alive}")

    def _compute(self, seq: Sequence, num: int) -> None:
        assert num > 0
        assert seq.state is State.RUNNING
        if seq.tail_payload is not None:
            self._write(seq, range(seq.num_prompt_tokens // SIZE * SIZE, seq.num_prompt_tokens))
            seq.tail_payload = None
        for position in range(seq.num_computed_tokens):
            assert self._row(seq, position) == self._content(seq, position), f"{seq}: foreign KV"
        self._write(seq, range(seq.num_computed_tokens, seq.num_computed_tokens + num))
        seq.num_computed_tokens += num
        self.scheduler.register_blocks(seq, seq.num_computed_tokens - num)
        if seq.num_pending_tokens == 0:
            seq.append_token(len(seq.token_ids))

    def _write(self, seq: Sequence, positions: range) -> None:
        for position in positions:
            assert self.pool.count_pins(seq.block_table[position // SIZE]) == 1, f"{seq} writes a shared block"
            self._row(seq, position)[:] = self._content(seq, position)

    def _row(self, seq: Sequence, position: int) -> memoryview:
        return self.blocks.row(seq.block_table[position // SIZE], position % SIZE)

    def _content(self, seq: Sequence, position: int) -> bytes:
        return _ROW.pack(hash(tuple(seq.token_ids[: position + 1])))


_SEQUENCE = re.compile(r"\+([a-z]+)(\d+)(?:/(\d+))?(?:@(\d+))?(b?)(!?)(?:#(\w+))?")


def play(script: str, num_blocks: int = 100, **given: int) -> None:
    """Play a scene, whose parts have semicolons between them, and check what each of its steps computes.

    `+long30/8@100`: add a sequence `long` with a prompt of 30 tokens, from 100 on, and 8 new ones, or 4. Behind that
    `b` stands for batch, `!` for a suspect, `#a` for the tenant `a`. `-long`: remove it. `?long`: it waits.
    `budget 28`: the tokens that a step may have from now on. `hold`, `free`: take all free blocks away, and give them
    back. `...`: any step. `long10 short18`: a step that computes so many tokens of these sequences, in this order.
    """
    dummy, seqs, held = ScheduledEngine(num_blocks, **given), dict[str, Sequence](), list[int]()
    for part in script.split(";"):
        match part.split():
            case ["..."]:
                dummy.step()
            case ["hold"]:
                held = dummy.pool.allocate_blocks(dummy.pool.num_free_blocks)
            case ["free"]:
                dummy.pool.free_blocks(held)
            case ["budget", number]:
                dummy.budget = int(number)
            case [word] if word[0] == "-":
                dummy.remove(seqs[word[1:]])
            case [word, *_] as words if word[0] == "?":
                assert all(seqs[one[1:]].is_waiting for one in words), f"{part} of {script}"
            case [word, *_] as words if word[0] == "+":
                for one in words:
                    name, seq = _read_sequence(one)
                    seqs[name] = seq
                    dummy.add(seq)
            case words:
                names = {seq: name for name, seq in seqs.items()}
                found = [f"{names[seq]}{num}" for seq, num in dummy.step()]
                assert found == words, f"{found} instead of {part} of {script}"


def _read_sequence(word: str) -> tuple[str, Sequence]:
    """Return the name of a sequence and the sequence, as `play` describes it."""
    found = _SEQUENCE.fullmatch(word)
    assert found is not None, word
    name, length, new, first, is_batch, is_suspect, tenant = found.groups()
    seq = seq_of(
        int(length), int(new or 4), priority_class="batch" if is_batch else "interactive", first=int(first or 0),
        tenant=tenant or "",
    )  # fmt: skip
    seq.is_suspect = bool(is_suspect)
    return name, seq
