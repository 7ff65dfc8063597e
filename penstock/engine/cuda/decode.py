"""Decode steps as CUDA graphs: what a step launches is recorded once for each number of sequences, and replayed.

A graph reads its inputs where it read them when it was recorded, so they are copied there. Numbers of sequences are
padded to powers of two; padding rows compute on a spare block that belongs to no sequence.

Two sets of pinned inputs are used in turn: while the GPU runs a step, the host writes what it knows of the next one.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from penstock.engine.batch import Batch
from penstock.engine.cuda.copies import CopyEvent
from penstock.engine.cuda.varlen import VarlenCall, VarlenStep, Windows, pad_to_power_of_two
from penstock.engine.scheduler import Plan
from penstock.engine.sequence import Sequence
from penstock.engine.step import Step
from penstock.engine.storage import KVStorage

log = logging.getLogger(__name__)

Compute = Callable[[Step], Tensor]
"""The model's forward pass: logits of all rows, [T, vocabulary]."""

MAX_RELATIVE_ERROR = 0.01
"""Root mean square of the error of a replayed step's logits, relative to theirs."""


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
    """Runs steps in which every sequence decodes. Recorded after the first of each size, which is the warm-up.

    What is recorded is replayed at once, and stays only if it gives the same.
    Writing a token's KV again changes nothing.
    """

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
        self._device, capacity = storage.data.device, pad_to_power_of_two(max_batch)
        rows = partial(HostInputs, capacity, max_blocks, storage.layout.block_size, spare)
        self._host_inputs = [rows(pinned=self._device.type == "cuda") for _ in range(2)]
        self._copy_events: list[CopyEvent | None] = [None, None]
        """By set of inputs: the end of the last copy from it."""
        self._turn = 0
        self._numbers, self._lengths, self._tables = (
            tensor.to(self._device, copy=True)
            for tensor in (self._host_inputs[0].numbers, self._host_inputs[0].lengths, self._host_inputs[0].tables)
        )
        self._starts = torch.arange(capacity + 1, dtype=torch.int32, device=self._device)
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self._is_enabled = True

    def can_run(self, plan: Plan) -> bool:
        """Return whether every sequence decodes."""
        return self._is_enabled and all(seq.num_pending_tokens == num == 1 for seq, num in plan)

    def run_step(self, seqs: list[Sequence], compute: Compute) -> Tensor:
        """Logits, in the order of the sequences: [at least as many rows, vocabulary], valid until the next step."""
        size = pad_to_power_of_two(len(seqs))
        self._upload_inputs(seqs, size)
        replay = self._replays.get(size)
        if replay is not None:
            return replay()
        logits = self._compute_step(size, compute)
        try:
            replay = self._recorder.record_graph(partial(self._compute_step, size, compute))
        except RuntimeError as error:
            self._disable(str(error).partition("\n")[0])
            return logits
        right = logits[: len(seqs)].float()
        difference = (replay()[: len(seqs)].float() - right).square().mean().sqrt()
        if bool(difference <= MAX_RELATIVE_ERROR * right.square().mean().sqrt()):
            self._replays[size] = replay
        else:
            self._disable("a recorded step gives other logits than it did before")
        return logits

    def _disable(self, reason: str) -> None:
        log.warning("decode steps are launched one kernel at a time: %s", reason)
        self._is_enabled = False

    def prepare_next_step(self, seqs: list[Sequence]) -> None:
        """Write what is known of the next step, in case the same sequences go on."""
        self._wait_for_inputs().write_known_rows(seqs)

    def _upload_inputs(self, seqs: list[Sequence], size: int) -> None:
        host = self._wait_for_inputs()
        host.write_step(seqs, size)
        self._numbers.copy_(host.numbers, non_blocking=True)
        self._lengths.copy_(host.lengths, non_blocking=True)
        self._tables[:size].copy_(host.tables[:size], non_blocking=True)
        self._copy_events[self._turn] = self._recorder.record_event()
        self._turn ^= 1

    def _wait_for_inputs(self) -> HostInputs:
        """Return the next set of inputs, once no copy from it is under way."""
        mark = self._copy_events[self._turn]
        if mark is not None:
            mark.synchronize()
        return self._host_inputs[self._turn]

    def _compute_step(self, size: int, compute: Compute) -> Tensor:
        numbers = self._numbers[:, :size]
        batch = Batch([], self._storage.layout.block_size, self._device)
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
