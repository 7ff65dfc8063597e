"""Decode steps as CUDA graphs: what a step launches is recorded for some numbers of sequences, and replayed.

A graph reads its inputs where it read them when it was recorded, so they are copied there. Numbers of sequences are
padded to the next size that was recorded; padding rows compute on a spare block that belongs to no sequence.

Two sets of pinned inputs are used in turn: while the GPU runs a step, the host writes what it knows of the next one.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.cuda.copies import CopyEvent
from penstock.engine.cuda.varlen import PlanRefused, VarlenCall, VarlenStep, Windows
from penstock.engine.scheduler import Plan
from penstock.engine.sequence import Sequence
from penstock.engine.step import Step
from penstock.engine.step_batch import StepBatch
from penstock.engine.storage import KVStorage

log = logging.getLogger(__name__)

Compute = Callable[[Step], Tensor]
"""The model's forward pass: logits of all rows, [T, vocabulary]."""

NUM_TRIAL_TOKEN_IDS = 64
"""How many different tokens the steps have that are computed to record them."""
MAX_CHANGED_SHARE = 4
"""If more than one row of this many has another block table, all are copied at once."""
MAX_RELATIVE_ERROR = 0.01
"""Root mean square of the error of a replayed step's logits, relative to theirs."""


def list_graph_sizes(max_batch: int) -> list[int]:
    """Return the numbers of sequences to record: 1, 2, 4, 8, then by eights, until `max_batch` is reached."""
    sizes = [1, 2, 4, 8, *range(16, max_batch + 8, 8)]
    return [size for size, before in zip(sizes, [0, *sizes], strict=False) if before < max_batch]


class HostInputs:
    """The inputs of a decode step on the host, a row per sequence. Only what changed in a row is written."""

    def __init__(self, capacity: int, width: int, block_size: int, spare: int, *, pinned: bool) -> None:
        self.numbers = torch.zeros(4, capacity, dtype=torch.int64, pin_memory=pinned)
        """For each sequence's new token: token id, position, block, and row in the block."""
        self.lengths = torch.ones(capacity, dtype=torch.int32, pin_memory=pinned)
        self.tables = torch.full((capacity, width), spare, dtype=torch.int32, pin_memory=pinned)
        self._block_size, self._spare = block_size, spare
        self._blocks: list[list[int]] = [[] for _ in range(capacity)]
        """By row: the block table that it was written from. The list only grows while its sequence has it."""
        self._num_blocks = [0] * capacity
        """By row: how many blocks of this table were written."""
        self._positions = [-1] * capacity
        self._arrays = self.numbers.numpy(), self.lengths.numpy(), self.tables.numpy()
        self._arrays[0][2] = spare

    def get_table(self, row: int) -> tuple[list[int], int]:
        """Return the block table that a row was written from, and how many of its blocks were written."""
        return self._blocks[row], self._num_blocks[row]

    def write_step(self, seqs: list[Sequence], size: int) -> int:
        """Write each sequence's row, and padding rows up to `size`. Returns how many rows had to be written."""
        num_written = self.write_known_rows(seqs)
        assert self._positions[: len(seqs)] == [seq.num_computed_tokens for seq in seqs], "a row without its block"
        self._arrays[0][0, : len(seqs)] = [seq.token_ids[seq.num_computed_tokens] for seq in seqs]
        for row in range(len(seqs), size):
            num_written += self._write_row(row, [], 0)
        return num_written

    def write_known_rows(self, seqs: list[Sequence]) -> int:
        """Write the rows without token ids, except for sequences whose next block is not allocated yet."""
        return sum(
            self._write_row(row, seq.block_table, seq.num_computed_tokens)
            for row, seq in enumerate(seqs)
            if seq.num_computed_tokens < len(seq.block_table) * self._block_size
        )

    def _write_row(self, row: int, blocks: list[int], position: int) -> bool:
        if self._positions[row] == position and self._blocks[row] is blocks:
            return False
        is_padding = not blocks
        if is_padding and self._positions[row] == -1:
            return False
        numbers, lengths, tables = self._arrays
        known = self._num_blocks[row] if self._blocks[row] is blocks else 0
        tables[row, known : len(blocks)] = blocks[known:]
        tables[row, len(blocks) : self._num_blocks[row]] = self._spare
        index, offset = divmod(position, self._block_size)
        numbers[1:, row] = position, self._spare if is_padding else blocks[index], offset
        lengths[row] = position + 1
        if is_padding:
            numbers[0, row] = 0
        self._blocks[row], self._num_blocks[row] = blocks, len(blocks)
        self._positions[row] = -1 if is_padding else position
        return True


class Recorder(Protocol):
    """Records device work for replay."""

    def record_graph(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return a function that does the same work on the same tensors, with its result in the same tensor.

        Raises `RuntimeError` for work that cannot be recorded: if it waits for the device, or copies from it.
        """

    def record_event(self) -> CopyEvent:
        """Return an event at the end of the work that is queued now."""


class CudaRecorder:
    """Records CUDA graphs. They share one memory pool, because only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
        self._pool = torch.cuda.graph_pool_handle()

    def record_graph(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record work as a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def record_event(self) -> CopyEvent:
        """Return an event at the end of the current stream's work."""
        mark: CopyEvent = torch.cuda.current_stream(self._device).record_event()
        return mark


class DecodeGraphs:
    """Runs steps in which every sequence decodes, once `record_steps` has recorded them."""

    def __init__(
        self,
        storage: KVStorage,
        windows: Windows,
        *,
        max_batch: int,
        max_blocks: int,
        spare: int,
        recorder: Recorder,
    ) -> None:
        """`max_blocks`: of one sequence. `spare`: the block for padding."""
        self._storage, self._windows, self._recorder = storage, windows, recorder
        self._sizes = list_graph_sizes(max_batch)
        self._device, capacity = storage.data.device, self._sizes[-1]
        rows = partial(HostInputs, capacity, max_blocks, storage.layout.block_size, spare)
        self._host_inputs = [rows(pinned=self._device.type == "cuda") for _ in range(2)]
        self._copy_events: list[CopyEvent | None] = [None, None]
        """By set of inputs: the end of the last copy from it."""
        self._turn = 0
        self._numbers, self._lengths, self._tables = (
            tensor.to(self._device, copy=True)
            for tensor in (self._host_inputs[0].numbers, self._host_inputs[0].lengths, self._host_inputs[0].tables)
        )
        self._device_tables = [self._host_inputs[0].get_table(row) for row in range(capacity)]
        """By row of the tables on the device: what it was copied from."""
        self._starts = torch.arange(capacity + 1, dtype=torch.int32, device=self._device)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        """What was recorded, by number of sequences, rising."""

    def record_steps(self, compute: Compute, report: Callable[[float], None]) -> None:
        """Record a step of each size. `report` gets the share that is done. No block may be in use.

        A step is computed first, which is the warm-up, and what is recorded is replayed at once. It stays only if it
        gives the same: otherwise, and if it cannot be recorded, decode steps are launched one kernel at a time. A size
        that cannot be computed is left out, and the next one takes its place.
        """
        generator = torch.Generator().manual_seed(5)
        self._write_trial_inputs(generator)
        for number, size in enumerate(reversed(self._sizes)):  # smaller ones find room in the memory of larger ones
            report(number / len(self._sizes))
            try:
                logits = self._compute_step(size, compute)
            except PlanRefused as error:
                log.warning("decode steps of %d sequences are not recorded: %s", size, error)
                continue
            try:
                replay = self._recorder.record_graph(partial(self._compute_step, size, compute))
            except RuntimeError as error:
                self._disable(str(error).partition("\n")[0])
                break
            right = logits.float()
            difference = (replay().float() - right).square().mean().sqrt()
            if not bool(difference <= MAX_RELATIVE_ERROR * right.square().mean().sqrt()):
                self._disable("a recorded step gives other logits than it did before")
                break
            self._replays = {size: replay, **self._replays}
        self._storage.data[self._trial_blocks] = 0
        self._tables.copy_(self._host_inputs[0].tables)

    def _write_trial_inputs(self, generator: torch.Generator) -> None:
        """Write inputs of a step to the device in which every sequence has another block, length and token."""
        capacity, size = len(self._lengths), self._storage.layout.block_size
        offsets = torch.randint(size, (capacity,), generator=generator)
        blocks = torch.arange(capacity) % len(self._storage.data)
        ids = torch.randint(NUM_TRIAL_TOKEN_IDS, (capacity,), generator=generator)
        self._trial_blocks = torch.arange(min(capacity, len(self._storage.data)), device=self._device)
        self._numbers.copy_(torch.stack([ids, offsets, blocks, offsets]))
        self._lengths.copy_(offsets + 1)
        self._tables.copy_(blocks[:, None].expand_as(self._tables))

    def list_recorded_sizes(self) -> list[int]:
        """Return the numbers of sequences of the steps that were recorded."""
        return list(self._replays)

    def can_run(self, plan: Plan) -> bool:
        """Return whether every sequence decodes, and a step of so many was recorded."""
        return self._find_size(len(plan)) > 0 and all(seq.num_pending_tokens == num == 1 for seq, num in plan)

    def _find_size(self, count: int) -> int:
        """Return the smallest recorded size that is not below `count`, or 0."""
        return next((size for size in self._replays if size >= count), 0)

    def run_step(self, seqs: list[Sequence]) -> Tensor:
        """Logits, in the order of the sequences: [at least as many rows, vocabulary], valid until the next step."""
        size = self._find_size(len(seqs))
        self._upload_inputs(seqs, size)
        return self._replays[size]()

    def _disable(self, reason: str) -> None:
        log.warning("decode steps are launched one kernel at a time: %s", reason)
        self._replays.clear()

    def prepare_next_step(self, seqs: list[Sequence]) -> None:
        """Write what is known of the next step, in case the same sequences go on."""
        self._wait_for_inputs().write_known_rows(seqs)

    def _upload_inputs(self, seqs: list[Sequence], size: int) -> None:
        host = self._wait_for_inputs()
        host.write_step(seqs, size)
        self._numbers.copy_(host.numbers, non_blocking=True)
        self._lengths.copy_(host.lengths, non_blocking=True)
        self._upload_tables(host, size)
        self._copy_events[self._turn] = self._recorder.record_event()
        self._turn ^= 1

    def _upload_tables(self, host: HostInputs, size: int) -> None:
        """Copy the rows of the block tables that are not on the device yet, one by one if they are few."""
        tables = [host.get_table(row) for row in range(size)]
        before = self._device_tables
        changed = [
            row
            for row, (blocks, count) in enumerate(tables)
            if count != before[row][1] or (count and blocks is not before[row][0])
        ]
        if len(changed) * MAX_CHANGED_SHARE > size:
            self._tables[:size].copy_(host.tables[:size], non_blocking=True)
        else:
            for row in changed:
                self._tables[row].copy_(host.tables[row], non_blocking=True)
        before[:size] = tables

    def _wait_for_inputs(self) -> HostInputs:
        """Return the next set of inputs, once no copy from it is under way."""
        mark = self._copy_events[self._turn]
        if mark is not None:
            mark.synchronize()
        return self._host_inputs[self._turn]

    def _compute_step(self, size: int, compute: Compute) -> Tensor:
        numbers = self._numbers[:, :size]
        batch = StepBatch([], self._storage.layout.block_size, self._device)
        batch.input_ids, batch.position_ids, batch.slots = numbers[0:1], numbers[1:2], (numbers[2], numbers[3])
        call = VarlenCall(
            rows=slice(0, size),
            num_queries=size,
            starts=self._starts[: size + 1],
            max_rows=1,
            tables=self._tables[:size],
            lengths=self._lengths[:size],
        )
        return compute(VarlenStep(batch, self._storage, self._windows, [call]))
