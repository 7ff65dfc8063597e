"""The recurrent and convolution states of sequences: one row of memory each, with the states of all layers.

A state holds what a layer has seen of all tokens so far, so it is not made of blocks. Its numbers depend on how the
tokens were divided among the calls of the layer. So that they depend on nothing else, the division follows from the
tokens alone: a prompt is read in scan chunks, from each multiple of `scan_chunk_tokens` to the next or to the prompt's
end, and what follows it token by token.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from penstock.engine.kernels.memory import map_zeros
from penstock.engine.kernels.recurrence import Run, Runs
from penstock.engine.sequence import Sequence
from penstock.kvstore.block import find_last_scan_chunk

MIN_CELL_TOKENS = 64
"""The fewest tokens of a scan chunk: transformers' scans work in chunks of as many or more."""
MIN_INTERVAL_TOKENS = 256
"""The fewest tokens between two snapshots of a state."""
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class StatePart:
    """One state of one layer, for one sequence."""

    layer: int
    kind: Literal["conv", "recurrent"]
    index: int
    """Its number among the layer's states of this kind."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes in a row."""
        size = prod(self.shape) * self.dtype.itemsize
        return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True)
class StateLayout:
    """The parts of a row, and the positions at which states are cut and kept."""

    parts: tuple[StatePart, ...]
    scan_chunk_tokens: int
    """Tokens of a prompt that a layer reads at once; a multiple of the block size."""
    interval_tokens: int
    """Every so many tokens a snapshot is kept; a multiple of `scan_chunk_tokens`."""
    continues: bool = True
    """Whether the layers can read several tokens after others. If not, they read all but the first scan chunk one by
    one: some of transformers' scans begin without a state."""

    @cached_property
    def row_bytes(self) -> int:
        """How many bytes a row has."""
        return sum(part.num_bytes for part in self.parts)

    @cached_property
    def num_parts_by_layer(self) -> dict[int, int]:
        """By layer: how many states of a kind it has at most."""
        return {part.layer: 1 + max(p.index for p in self.parts if p.layer == part.layer) for part in self.parts}

    def __str__(self) -> str:
        parts = ";".join(f"{p.layer}:{p.kind}:{p.index}:{p.shape}:{p.dtype}" for p in self.parts)
        return f"{self.scan_chunk_tokens}|{self.interval_tokens}|{self.continues}|{parts}"

    def find_cell_end(self, end: int, num_prompt_tokens: int) -> int:
        """Return up to where a step computes that would end after `end` tokens: it ends within no scan chunk."""
        if end >= num_prompt_tokens:
            return end
        return min(-(-end // self.scan_chunk_tokens) * self.scan_chunk_tokens, num_prompt_tokens)

    def cut_pieces(self, start: int, end: int, num_prompt_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield from and to which token a layer reads at once."""
        while start < end:
            stop = start + 1
            if start < num_prompt_tokens and (self.continues or start == 0):
                stop = min((start // self.scan_chunk_tokens + 1) * self.scan_chunk_tokens, num_prompt_tokens, end)
            yield start, stop
            start = stop

    def count_until_kept(self, position: int) -> int:
        """Return how many tokens of an answer there are behind `position` before the next that a snapshot follows."""
        return self.interval_tokens - 1 - position % self.interval_tokens

    def is_kept_at(self, position: int, num_prompt_tokens: int) -> bool:
        """Return whether a snapshot of the state after `position` tokens is kept.

        Snapshots are kept at each interval, at the end of the prompt for a hand-off, and at the last scan chunk before
        it. A longer prompt can go on from that chunk.
        """
        if position in (num_prompt_tokens, find_last_scan_chunk(num_prompt_tokens, self.scan_chunk_tokens)):
            return True
        return position > 0 and position % self.interval_tokens == 0


def choose_scan_chunk_tokens(block_size: int) -> int:
    """Return the number of tokens of a scan chunk for blocks of this size."""
    return -(-MIN_CELL_TOKENS // block_size) * block_size


def choose_interval_tokens(row_bytes: int, bytes_per_token: float, scan_chunk_tokens: int) -> int:
    """Return after how many tokens a snapshot is kept: it takes no more bytes than their KV."""
    wanted = max(MIN_INTERVAL_TOKENS, row_bytes / bytes_per_token)
    return -int(-wanted // scan_chunk_tokens) * scan_chunk_tokens


class Guess(NamedTuple):
    """Guessed tokens of a sequence that a step has read, but for their state."""

    seq: Sequence
    start: int
    """How many tokens the state has read."""
    runs: Runs
    """They are in what was read with these."""
    first: int
    """Where the first one is in it."""


class StateStorage:
    """`num_rows` rows of one layout, in host memory."""

    def __init__(self, layout: StateLayout, num_rows: int) -> None:
        self.layout = layout
        self.data = map_zeros(num_rows * layout.row_bytes, torch.uint8).view(num_rows, layout.row_bytes)
        self._bytes = self.data.numpy()
        self._parts: dict[int, list[tuple[StatePart, Tensor]]] = {}
        """By layer: its states of all rows, [rows, *shape]."""
        self.guesses: list[Guess] = []
        """Those of the step that is computed."""
        offset = 0
        for part in layout.parts:
            mine = self.data[:, offset : offset + prod(part.shape) * part.dtype.itemsize]
            view = mine.view(part.dtype).view(num_rows, *part.shape)
            self._parts.setdefault(part.layer, []).append((part, view))
            offset += part.num_bytes

    def open_layer(self, layer: int, rows: slice, *, is_new: bool = False) -> LinearAttentionLayer:
        """Return a layer's states in some rows, as transformers' cache has them.

        `is_new`: no token was read yet.
        """
        work = LinearAttentionLayer(number_of_states=self.layout.num_parts_by_layer[layer])
        for part, states in self._parts[layer]:
            view = states[rows]
            if part.kind == "conv":
                work.conv_states[part.index], work.conv_kernel_size[part.index] = view, part.shape[-1]
                work.is_conv_states_initialized[part.index] = True
            else:
                work.recurrent_states[part.index] = view
                work.is_recurrent_states_initialized[part.index] = True
            work.has_previous_state[part.index] = not is_new
        return work

    def read_right_guesses(self) -> None:
        """Read the guesses that were drawn into the states, which then have all computed tokens, and forget all."""
        for runs, guesses in groupby(self.guesses, attrgetter("runs")):
            counts = [(guess, guess.seq.num_computed_tokens - guess.start) for guess in guesses]
            right = [Run(guess.seq.state_row, guess.first, num, num) for guess, num in counts if num > 0]
            if right:
                runs.repeat_calls(Runs(right))
        self.guesses = []

    def copy_layer(self, source: int, target: int, layer: int) -> None:
        """Copy a layer's states from one row to another."""
        for _, states in self._parts[layer]:
            states[target].copy_(states[source])

    def copy_row(self, source: int, target: int) -> None:
        """Copy all states of a row to another row."""
        self.data[target].copy_(self.data[source])

    def zero_row(self, row: int) -> None:
        """Zero a row, so that its new owner reads nothing of the old one."""
        self.data[row].zero_()

    def write_row(self, row: int, payload: memoryview | bytes) -> None:
        """Fill a row from `row_bytes` bytes."""
        self._bytes[row][:] = np.frombuffer(payload, np.uint8)

    def read_layer(self, layer: int) -> Tensor:
        """Return a copy of a layer's states in float32: [rows, numbers]."""
        return torch.cat([states.flatten(1).float() for _, states in self._parts[layer]], 1)

    def view_row(self, row: int) -> memoryview:
        """Return a read-only view of a row's own bytes."""
        return memoryview(self._bytes[row]).toreadonly()
