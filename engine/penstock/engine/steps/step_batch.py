"""The batch of one step as tensors: token ids, positions, and the slots of new KV.

The kernels read the same numbers without torch: behind a step that has read all weights nothing of torch is in the
processor's cache, and its first operation takes 100 us.
"""

from array import array
from functools import cached_property

import torch
from torch import Tensor

from penstock.engine.device import to_device
from penstock.engine.sequence import Plan, Sequence


class StepBatch:
    """The tensors of one step. The drafts of the sequences are part of it.

    `plan` counts them, and is reordered: sequences with one new token first, then those with several.
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
            self._positions += range(start, end)
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
        self.num_sampled_rows = len(self._logit_rows)
        """The first rows of logits, which tokens are sampled from. Those of `prompt_rows` follow."""
        self._logit_rows += prompt_logit_rows

    def _to_tensor(self, values: list[int]) -> Tensor:
        return to_device(values, self.device, torch.int64)

    @cached_property
    def row_values(self) -> "array[int]":
        """The ids, positions, blocks and rows in the blocks of the T new tokens, one list behind the other."""
        rows = [position % self.block_size for position in self._positions]
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
        """Their positions, each in its own sequence: [1, T]."""
        return self._rows[1:2]

    @property
    def last_position(self) -> int:
        """The highest position."""
        return max(self._positions)

    @cached_property
    def answer_rows(self) -> Tensor:
        """Which of the T new tokens are behind their sequence's prompt: [T]."""
        ends = [seq.num_prompt_tokens for seq, num in self.plan for _ in range(num)]
        return self.position_ids[0] >= self._to_tensor(ends)

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
