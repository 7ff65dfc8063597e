"""Block tables: the blocks that a sequence finds cached, needs and holds. Plain Python over the pool.

How many more blocks running answers will need is estimated, as far as those before them tell. An answer is taken to end
after each of its tokens with the same probability `rate`, the share of tokens behind which one ended lately, and in any
case after `max_new_tokens`. So of blocks that sequences hold now, after `tokens` more of each

    exp(-rate * tokens) * (blocks held now + tokens / block size)

are expected to be held, summed over the sequences that may get so many. They need the maximum over all `tokens`.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.engine.memory.pool import BlockPool
from penstock.engine.sequence import Sequence

if TYPE_CHECKING:  # it imports torch
    from penstock.engine.memory.state_rows import StateRows

WINDOW_TOKENS = 2**16
"""A count loses half of its weight at least once in so many generated tokens."""
FIRST_TOKENS, FIRST_ENDS = 512.0, 1.0
"""Tokens and ends that are counted from the start, so that the first answers are not expected to be endless."""


class GrowthEstimate:
    """Counts generated tokens and early ends of answers, and expects the same of those that run."""

    def __init__(self) -> None:
        self._num_tokens = self._num_ends = 0.0

    def record_tokens(self, count: int) -> None:
        """Count generated tokens."""
        self._num_tokens += count
        if self._num_tokens >= 2 * WINDOW_TOKENS:
            self._num_tokens, self._num_ends = self._num_tokens / 2, self._num_ends / 2

    def record_end(self) -> None:
        """Count an answer that ended before it had all the tokens that it might have got."""
        self._num_ends += 1

    def estimate_peak_blocks(self, answers: Iterable[tuple[int, int]], block_size: int) -> float:
        """Return how many blocks answers hold together when they hold the most.

        For each answer the number of tokens that it may still get, and the blocks that it holds now.
        """
        rate = (self._num_ends + FIRST_ENDS) / (self._num_tokens + FIRST_TOKENS)
        ordered = sorted(answers, reverse=True)
        peak = sum_held = 0.0
        for number, (num_left, num_held) in enumerate(ordered, 1):
            sum_held += num_held
            # Where only these answers may go on, the sum has one maximum, and it may lie outside.
            num_next = ordered[number][0] if number < len(ordered) else 0
            tokens = min(max(1 / rate - sum_held / number * block_size, num_next), num_left)
            peak = max(peak, math.exp(-rate * tokens) * (sum_held + number * tokens / block_size))
        return peak


class BlockTables:
    """The block tables of the running sequences."""

    def __init__(self, pool: BlockPool, states: "StateRows | None" = None) -> None:
        self.pool, self._states = pool, states
        self.growth = GrowthEstimate()
        self._computing: dict[bytes, Sequence] = {}
        """By block key: the running sequence that computes this block, or has computed it."""

    def is_being_computed(self, seq: Sequence) -> bool:
        """Return whether a running sequence is computing the first block that a waiting sequence misses.

        Then the waiting one need not compute it as well. The running one has no lower priority, and all the blocks it
        needs for this, so the wait is short.
        """
        keys = self._shareable_keys(seq)
        index = self.pool.count_cached_prefix(keys)
        owner = self._computing.get(keys[index]) if index < len(keys) else None
        return (
            owner is not None
            and owner.priority <= seq.priority
            and owner.num_computed_tokens < (index + 1) * self.pool.block_size
        )

    def count_preemptions_needed(
        self, seq: Sequence, running: list[Sequence], candidates: list[Sequence]
    ) -> int | None:
        """Return how many of `candidates`, in order, must be preempted to admit `seq`; None if all are too few.

        `seq` needs blocks for its tokens, and one for each sequence that can still grow, itself included, unless it
        runs alone. And there have to be enough for what those that stay and itself are expected to hold together at any
        time, candidates left aside: they make way later, too.
        """
        cached = self._cached_keys(seq)
        num_wanted = self.count_blocks_at_admission(seq) - len(cached)
        num_free = self.pool.count_free_blocks_besides(cached)
        if num_wanted > num_free and not candidates:
            return None
        if not running or num_wanted + self.bound_growth([*running, seq]) <= num_free:
            return 0
        num_staying = len(running) - len(candidates)
        if num_staying:
            tables = [other.block_table for other in candidates]
            num_freed = self.pool.count_blocks_freed(tables, cached) if tables else 0
            if num_wanted + self.estimate_growth([*running[:num_staying], seq]) > num_free + num_freed:
                return None
        num_growing = self.count_growing(running) + self._can_grow(seq)
        if num_wanted + num_growing <= num_free:
            return 0

        def fits(count: int) -> bool:
            spare = num_growing - self.count_growing(candidates[:count]) if count < len(running) else 0
            freed = self.pool.count_blocks_freed([other.block_table for other in candidates[:count]], cached)
            return num_wanted + spare <= num_free + freed

        if not fits(len(candidates)):
            return None
        return next(count for count in range(1, len(candidates) + 1) if fits(count))

    def allocate_table(self, seq: Sequence) -> None:
        """Give a sequence blocks for its tokens, and set how many of the tokens are computed already.

        Drops a tail payload that is of no use. One that remains is to be copied to its block.
        """
        keys = self._shareable_keys(seq) if self._states is None else self._cached_keys(seq)
        num_start = self.find_start(seq)
        seq.block_table = self.pool.pin_cached_prefix(keys, counted=not seq.num_preemptions)
        num_cached = len(seq.block_table)
        seq.block_table += self.pool.allocate_blocks(self.count_blocks_at_admission(seq) - num_cached)
        seq.num_computed_tokens = num_start
        if num_start == num_cached * self.pool.block_size:
            seq.tail_payload = None
        if self._states is not None:
            self._states.restore_snapshot(seq)
        self._computing.update((key, seq) for key in seq.block_keys[num_cached:])

    def count_tokens_to_compute(self, seq: Sequence) -> int:
        """Return how many tokens of a waiting sequence are not cached."""
        return len(seq.token_ids) - len(self._cached_keys(seq)) * self.pool.block_size

    def register_blocks(self, seq: Sequence, first_token: int) -> None:
        """Register the sequence's full blocks that have a key, from the one that holds token `first_token` on."""
        size = self.pool.block_size
        num_full = min(seq.num_computed_tokens // size, len(seq.block_table), len(seq.block_keys))
        for index in range(first_token // size, num_full):
            self.pool.register_block(seq.block_table[index], seq.block_keys[index])

    def count_growing(self, running: list[Sequence]) -> int:
        """Return how many of the sequences may need another block."""
        return sum(map(self._can_grow, running))

    def estimate_growth(self, seqs: Iterable[Sequence]) -> int:
        """Return how many more blocks the sequences are expected to hold together than now, when they hold the most.

        A waiting sequence holds those of its admission.
        """
        # The KV of the last token is never read.
        answers = [(seq.max_new_tokens - seq.num_output_tokens - 1, self._count_own_blocks(seq)) for seq in seqs]
        peak = self.growth.estimate_peak_blocks(answers, self.pool.block_size)
        return math.ceil(peak) - sum(num_held for _, num_held in answers)

    def bound_growth(self, seqs: list[Sequence]) -> int:
        """Return a number of blocks that neither `estimate_growth` nor `count_growing` exceeds, in far less time."""
        num_tokens = sum([seq.max_new_tokens for seq in seqs])
        return max(len(seqs), -(-num_tokens // self.pool.block_size))

    def _count_own_blocks(self, seq: Sequence) -> int:
        """Return how many of its blocks no other sequence holds."""
        table, count_pins = seq.block_table, self.pool.count_pins
        if not table:
            return self.count_blocks_at_admission(seq) - len(self._cached_keys(seq))
        if count_pins(table[0]) == 1:
            return len(table)
        return len(table) - bisect_left(table, True, key=lambda block: count_pins(block) == 1)  # the first are shared

    def count_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many more blocks the sequence needs for its first `num_tokens` tokens; 0 or less if none."""
        return -(-num_tokens // self.pool.block_size) - len(seq.block_table)

    def stop_computing(self, seq: Sequence) -> None:
        """Note that the sequence computes nothing any more. It may keep its blocks, so that they can be pinned."""
        for key in seq.block_keys:
            if self._computing.get(key) is seq:
                del self._computing[key]

    def _shareable_keys(self, seq: Sequence) -> list[bytes]:
        """Return the keys of the blocks that may be taken from the cache."""
        # The last token is always computed, for its logits, and a cached block is never written. So the block that
        # holds it is not among them.
        num_tokens = len(seq.token_ids) - 1
        if seq.num_prompt_logprobs is not None:
            num_tokens = min(num_tokens, len(seq.prompt_logprobs))
        return seq.block_keys[: num_tokens // self.pool.block_size]

    def _cached_keys(self, seq: Sequence) -> list[bytes]:
        """Return the shareable keys that the pool holds; of a sequence with a state, those before its snapshot."""
        keys = self._shareable_keys(seq)
        num_cached = (
            self.pool.count_cached_prefix(keys)
            if self._states is None
            else (self.find_start(seq) // self.pool.block_size)
        )
        return keys[:num_cached]

    def find_start(self, seq: Sequence) -> int:
        """Return how many leading tokens of a waiting sequence need not be computed."""
        num_cached = self.pool.count_cached_prefix(self._shareable_keys(seq))
        num_tokens = num_cached * self.pool.block_size
        if seq.tail_payload is not None and num_cached == seq.num_prompt_tokens // self.pool.block_size:
            num_tokens = min(seq.num_prompt_tokens, len(seq.token_ids) - 1)
        return num_tokens if self._states is None else self._states.find_start(seq, num_tokens)

    def count_blocks_at_admission(self, seq: Sequence) -> int:
        """Return how many blocks the sequence needs for the tokens that it has."""
        return -(-len(seq.token_ids) // self.pool.block_size)

    def _can_grow(self, seq: Sequence) -> bool:
        """Return whether the sequence may need more blocks than it has, or would have at its admission."""
        return (len(seq.block_table) or self.count_blocks_at_admission(seq)) < seq.count_blocks_needed(
            self.pool.block_size
        )

    def check_integrity(self, running: Iterable[Sequence], others: Counter[int] | None = None) -> None:
        """Assert that every sequence has the blocks it should have, and writes no shared one. For tests.

        `others`: how often each block is pinned by anything but running sequences; None if that is not known.
        """
        self.pool.check_integrity()
        running, size = list(running), self.pool.block_size
        held = Counter(block for seq in running for block in seq.block_table)
        assert all(count <= self.pool.count_pins(block) for block, count in held.items()), (
            "a block is in more tables than it has pins"
        )
        if others is not None:
            refs = Counter({block: self.pool.count_pins(block) for block in range(self.pool.num_blocks)})
            assert held + others == +refs, "the pins of a block do not add up"
        for seq in running:
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq}: a block twice"
            assert seq.num_computed_tokens <= len(seq.block_table) * size, f"{seq}: no blocks for what is computed"
            assert len(seq.block_table) <= seq.count_blocks_needed(size), f"{seq}: more blocks than it can use"
            written = seq.block_table[seq.num_computed_tokens // size :]
            assert all(self.pool.count_pins(block) == 1 for block in written), f"{seq} writes a shared block"
        assert set(self._computing.values()) <= set(running), "a sequence that does not run computes a block"
