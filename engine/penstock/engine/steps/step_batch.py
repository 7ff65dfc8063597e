"""The batch of one step as tensors: token ids, positions, and the slots of new KV.

The kernels read the same numbers without torch: behind a step that has read all weights nothing of torch is in the
processor's cache, and its first operation takes 100 us.
"""

from array import array
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.device import to_device
from penstock.engine.pictures.rows import SeenPicture
from penstock.engine.sequence import Plan, Sequence
from penstock.errors import RequestError, SequenceFailed


class SeenRows(NamedTuple):
    """The rows of pictures among the new tokens of a step."""

    at: Tensor
    """Where they are in the flat batch: [rows]."""
    seen: SeenPicture
    """What the model sees in all of them."""
    position_ids: Tensor
    """The positions of all T new tokens: [1, T], or [3, 1, T] on three axes."""


class StepBatch:
    """The tensors of one step. The drafts of the sequences are part of it.

    `plan` counts them, and is reordered: sequences with one new token first, then those with several. Raises
    `SequenceFailed` for a sequence of which a row of a picture is needed and cannot be had.
    """

    def __init__(self, plan: Plan, block_size: int, device: torch.device) -> None:
        counted = [(seq, num + len(seq.draft)) for seq, num in plan]
        self.plan = sorted(counted, key=lambda item: item[1] > 1)
        self.sampled_sequences = [seq for seq, num in self.plan if num >= seq.num_pending_tokens]
        """Sequences whose next token this step samples, and one more behind each token of their drafts; and those whose
        vector it computes.
        """
        self.keeps_hidden = any(seq.is_pooled for seq in self.sampled_sequences)
        """Whether what the head reads is wanted, and not only what it gives."""
        self.partial_new_blocks: list[int] = []
        """Blocks that this step begins to write and does not fill."""
        self.snapshot_rows: dict[tuple[Sequence, int], int] = {}
        """By sequence and number of tokens: the row to which its state is copied once it has read so many."""
        self.block_size, self.device = block_size, device
        self._collect_tokens()

    def _collect_tokens(self) -> None:
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._places: list[int] = []
        self._slot_blocks: list[int] = []
        self._logit_rows: list[int] = []
        self.prompt_rows: list[tuple[Sequence, range]] = []
        """Sequences whose prompt's log probabilities are wanted, and the positions whose logits are kept for that."""
        prompt_logit_rows: list[int] = []
        size = self.block_size
        for seq, num in self.plan:
            start, end = seq.num_computed_tokens, seq.num_computed_tokens + num
            self._ids += seq.token_ids[start:end]
            self._ids += seq.draft
            self._places += range(start, end)
            self._slot_blocks += [seq.block_table[position // size] for position in range(start, end)]
            last = (end - 1) // size
            if end % size and start <= last * size:
                self.partial_new_blocks.append(seq.block_table[last])
            if end >= len(seq.token_ids):
                self._logit_rows += range(len(self._ids) - 1 - len(seq.draft), len(self._ids))
            if seq.num_prompt_logprobs is not None:
                positions = range(max(start, len(seq.prompt_logprobs)), min(end, seq.num_prompt_tokens - 1))
                self.prompt_rows.append((seq, positions))
                prompt_logit_rows += [len(self._ids) - end + position for position in positions]
        self._positions = self._places
        """They differ where a sequence has pictures, and its model positions of three axes."""
        self.seen_rows: SeenRows | None = None
        """The rows of pictures that the step computes."""
        if any(seq.pictures is not None for seq, _ in self.plan):
            self._collect_pictures()
        self.num_sampled_rows = len(self._logit_rows)
        """The first rows of logits, which tokens are sampled from. Those of `prompt_rows` follow."""
        self._logit_rows += prompt_logit_rows

    def _collect_pictures(self) -> None:
        """Find the positions of all tokens, and what the model sees in the rows of pictures among them."""
        row, at, parts = 0, list[int](), list[SeenPicture]()
        has_axes = any(seq.pictures is not None and seq.pictures.has_axes for seq, _ in self.plan)
        axes: list[list[int]] = [[] for _ in range(3 if has_axes else 1)]
        for seq, num in self.plan:
            pictures, start, end = seq.pictures, seq.num_computed_tokens, seq.num_computed_tokens + num
            found = [range(start, end)] * 3 if pictures is None else pictures.find_positions(start, end)
            for axis, more in zip(axes, found, strict=False):
                axis.extend(more)
            if pictures is not None and start < pictures.end:
                try:
                    for first, seen in pictures.find_seen(start, end):
                        at += range(row + first - start, row + first - start + len(seen.rows))
                        parts.append(seen)
                except RequestError as error:
                    raise SequenceFailed(seq, error) from error
            row += num
        if has_axes:
            self._positions = axes[0]
        if parts:
            seen = SeenPicture(
                torch.cat([part.rows for part in parts]),
                tuple(map(torch.cat, zip(*(part.added for part in parts), strict=True))),
            )
            ids = self._to_tensor([position for axis in axes for position in axis])
            self.seen_rows = SeenRows(self._to_tensor(at), seen, ids.view(3, 1, -1) if has_axes else ids[None])

    def _to_tensor(self, values: list[int]) -> Tensor:
        return to_device(values, self.device, torch.int64)

    @cached_property
    def row_values(self) -> "array[int]":
        """The ids, positions, blocks and rows in the blocks of the T new tokens, one list behind the other."""
        rows = [place % self.block_size for place in self._places]
        return array("q", self._ids + self._positions + self._slot_blocks + rows)

    @cached_property
    def kept_values(self) -> "array[int]":
        """The numbers of `logits_to_keep`."""
        return array("q", self._logit_rows or [0])

    @cached_property
    def _rows(self) -> Tensor:
        """`row_values`: [4, T]."""
        return to_device(self.row_values, self.device, torch.int64).view(4, -1)

    @cached_property
    def input_ids(self) -> Tensor:
        """The tokens: [1, T]."""
        return self._rows[:1]

    @cached_property
    def position_ids(self) -> Tensor:
        """Their positions, each in its own sequence: [1, T]; on the first axis where there are three."""
        return self._rows[1:2]

    @cached_property
    def places(self) -> Tensor:
        """How many tokens of its sequence are before each: [T]."""
        return self._rows[1] if self._places is self._positions else self._to_tensor(self._places)

    @property
    def last_position(self) -> int:
        """The highest position."""
        return max(self._positions)

    @cached_property
    def answer_rows(self) -> Tensor:
        """Which of the T new tokens are behind their sequence's prompt: [T]."""
        ends = [seq.num_prompt_tokens for seq, num in self.plan for _ in range(num)]
        return self.places >= self._to_tensor(ends)

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Block, and row in the block, of each of the T new tokens: two of [T]."""
        return self._rows[2], self._rows[3]

    @cached_property
    def logits_to_keep(self) -> Tensor:
        """Index in the flat batch of each sampled sequence's last token and draft, then of `prompt_rows`; else [0]."""
        return to_device(self.kept_values, self.device, torch.int64)

    @property
    def num_kept_rows(self) -> int:
        """Number of rows of logits: those that tokens are sampled from, and those of `prompt_rows`."""
        return len(self._logit_rows)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, T."""
        return len(self._ids)
