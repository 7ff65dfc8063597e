"""One request in the engine: what is to be computed, its tokens, how far their KV is computed, and its block table."""

from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.counts import TokenCounts
from penstock.engine.drafts import Drafter
from penstock.engine.pictures.rows import Pictures
from penstock.errors import GrammarFailed, SequenceFailed
from penstock.grammar.state import GrammarState
from penstock.kvstore.block import BlockHasher, PromptBlocks
from penstock.messages import Logprobs, Sampling
from penstock.names import CLASSES, PriorityClass

Payload = bytes | bytearray | memoryview
"""The KV of one block, all layers, `block_bytes` long."""


class State(Enum):
    """The state of a sequence. It moves forward; only preemption moves it back from RUNNING to WAITING."""

    WAITING = "waiting"
    """Not admitted, or preempted: holds no blocks."""
    RUNNING = "running"
    """Admitted: holds blocks for its tokens, and gets more as it grows."""
    DONE = "done"
    """It has `max_new_tokens` output tokens, or its vector, or was removed."""


_NEXT = {State.WAITING: (State.RUNNING, State.DONE), State.RUNNING: (State.DONE,), State.DONE: ()}


class Sequence:
    """One request: what a worker asks for, its tokens, and the state of their KV.

    A worker that serves requests gives the following; a tool that only computes leaves it out. `blocks` are the names
    of the prompt's blocks. With a `lease_owner` the prompt is computed for a job: its blocks are stored where all
    workers can read them, and leased to this owner; without, the request is such a job (`was_handed_off`), or is
    answered by the worker that read it. Its blocks are to outlive others for `retain_s` behind its end, which
    `num_retained_blocks` of them then do. It was asked for at `since_s`, in seconds since the epoch; 0: when it comes
    to the engine. Events return `context` unchanged.

    `output_token_ids` are output tokens that this worker or another one generated before: their KV is computed where
    it is missing, but they are never sampled again. `max_new_tokens` counts them too; the longest answer that
    `sampling` allows is to fit, as another engine may go on with it. `seed` and position determine each draw.

    `block_keys[i]` is a hash over the tokens of the i-th full block and of all blocks before it, output tokens
    included; equal keys mean equal KV. `tail_payload` is the KV of the prompt's last block if that is partial, with
    zeros for the rows beyond the prompt. It is used if exactly the full blocks before it were found in the pool at
    admission, and dropped otherwise.

    A preempted sequence loses its blocks and keeps its tokens. When it is admitted again, blocks that are still in
    the pool are not computed again.

    `grammar` has been advanced by `output_token_ids`. It moves on with each token, and stays where it is when the
    sequence is preempted.

    With `num_prompt_logprobs` the log probabilities of the prompt's tokens are collected as it is computed, and of that
    many likeliest tokens at each place. Cached blocks have no logits, so its own are computed even if they are cached.

    An `is_pooled` sequence has no output: it is done once its prompt is computed, and `vector` is what the model's head
    would read at the last token.

    With an `adapter` the LoRA adapter with this digest computes it.

    With `pictures` some tokens of the prompt stand for rows of pictures. Penalties do not count them, and no draft has
    them.

    An `is_suspect` sequence may make a step fail: it is computed alone until one of its tokens was sampled.
    """

    num_retained_blocks = 0
    vector: "NDArray[np.float32] | None" = None

    def __init__(
        self,
        id: str,  # noqa: A002
        prompt: list[int],
        *,
        sampling: Sampling,
        seed: int,
        max_new_tokens: int,
        output_token_ids: Iterable[int] = (),
        block_keys: Iterable[bytes] = (),
        priority_class: PriorityClass = "interactive",
        tenant: str = "",
        weight: float = 1.0,
        is_suspect: bool = False,
        grammar: GrammarState | None = None,
        num_prompt_logprobs: int | None = None,
        blocks: PromptBlocks | None = None,
        lease_owner: str = "",
        was_handed_off: bool = True,
        retain_s: float = 0.0,
        since_s: float = 0.0,
        is_pooled: bool = False,
        pictures: Pictures | None = None,
        adapter: str = "",
        context: Any = None,
    ) -> None:
        self.id, self.priority_class, self.since_s = id, priority_class, since_s
        self.sampling, self.seed, self.max_new_tokens = sampling, seed, max_new_tokens
        self.tenant, self.weight = tenant, weight
        """The tenant's share of the tokens where tenants compete."""
        self.is_suspect, self.is_pooled = is_suspect, is_pooled
        self.grammar, self.pictures, self.adapter = grammar, pictures, adapter
        self.num_prompt_logprobs = num_prompt_logprobs
        self._blocks, self.lease_owner, self.was_handed_off = blocks, lease_owner, was_handed_off and not lease_owner
        self.retain_s, self.context = retain_s, context
        self.prompt_logprobs: list[Logprobs] = []
        """Those of the prompt's second token, its third, and so on, as far as they are computed."""
        self.block_keys = list(block_keys)
        self.token_ids = [*prompt, *output_token_ids]
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = 0
        """Number of leading tokens whose KV is in the pool."""
        self.num_cached_tokens = 0
        """Prompt tokens whose KV was in the pool or in the tail payload at the first admission."""
        self.block_table: list[int] = []
        """Block i of the table holds the tokens from `i * block_size` on."""
        self.missing_tiers: dict[int, int] = {}
        """By index: blocks that are still to be stored, and the tiers that miss them. Known once blocks were loaded."""
        self.num_named_blocks = 0
        """Full blocks that had their names when blocks were last looked for."""
        self.num_full_blocks = 0
        """Full blocks when blocks were last stored."""
        self.tail_payload: Payload | None = None
        self.state_row = 0
        """The row of its recurrent state, while it runs. The state has read the computed tokens."""
        self.new_snapshots: list[int] = []
        """After how many tokens snapshots of its state were kept that were not written to stores yet."""
        self.prompt_key: bytes | None = None
        """A hash over all tokens of the prompt, under which its state at their end is kept; None: it is not."""
        self.draft: list[int] = []
        """Tokens that the current step computes behind the last one, in case they are drawn; empty between steps."""
        self._counts: TokenCounts | None = None
        self._num_counted_tokens = 0
        """How many leading tokens `_counts` has."""
        self.state, self.num_preemptions = State.WAITING, 0
        self.priority = CLASSES.index(priority_class)
        """Index of its class; 0 goes first. The scheduler promotes a starving batch sequence to 0."""
        self.is_backfilled = False
        """Whether it runs in front of an earlier sequence of its class that did not fit yet."""
        self.arrival_number = 0
        """The scheduler numbers sequences as they are added."""
        self.last_scheduled_step = 0
        """Number of the step that last computed some of its tokens, or in which it was added."""
        assert self.num_prompt_tokens >= 1, "an empty prompt"
        assert self.num_output_tokens < max_new_tokens, "nothing left to generate"

    def __repr__(self) -> str:
        return f"Sequence({self.id!r}, {self.state.value}, {self.num_computed_tokens}/{len(self.token_ids)} tokens)"

    @cached_property
    def drafter(self) -> Drafter:
        """What guesses its next tokens. A sequence that is handed off with its first token has no use for it."""
        rows = set() if self.pictures is None else {self.token_ids[span.first] for span in self.pictures.spans}
        return Drafter(rows)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far, which is also the position of the next one."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def hasher(self) -> BlockHasher | None:
        """The hasher that names its full blocks, also before they are computed. None if its blocks have no names."""
        return None if self._blocks is None else self._blocks.hasher

    @property
    def blocks(self) -> PromptBlocks:
        """The names of the prompt's blocks, which a worker gives."""
        assert self._blocks is not None, f"{self.id}: the blocks of its prompt have no names"
        return self._blocks

    @property
    def output_token_ids(self) -> list[int]:
        """The output tokens so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_waiting(self) -> bool:
        """Whether it is not admitted yet, or preempted."""
        return self.state is State.WAITING

    @property
    def scheduling_order(self) -> tuple[int, bool, int]:
        """Sort key among the running sequences; the greatest is preempted first."""
        return self.priority, self.is_backfilled, self.arrival_number

    @property
    def is_grammar_ended(self) -> bool:
        """Return whether it has a grammar after whose end it is."""
        return self.grammar is not None and self.grammar.is_ended

    def compute_masks(self) -> list[NDArray[np.int32] | None]:
        """Return the masks of the tokens that its grammar allows next, and behind each token of the draft.

        Without a grammar they are None. There are fewer of them if the draft leaves the grammar or ends it. Raises
        `SequenceFailed` if the grammar does not allow the tokens so far, or its mask takes too much work.
        """
        if self.grammar is None:
            return [None] * (1 + len(self.draft))
        try:
            if len(self.grammar.token_ids) < self.num_output_tokens:  # a token was refused: say so now
                self.grammar.advance(self.output_token_ids[len(self.grammar.token_ids) :])
            masks: list[NDArray[np.int32] | None] = [_compute_mask(self.grammar)]
        except GrammarFailed as error:
            raise SequenceFailed(self, error) from error
        state = self.grammar.copy() if self.draft else self.grammar
        with suppress(GrammarFailed):  # if the tokens are drawn all the same, the next step fails
            for token_id in self.draft:
                state.advance([token_id])
                if state.is_ended:
                    break
                masks.append(_compute_mask(state))
        return masks

    def count_tokens(self) -> TokenCounts:
        """Return how often each token occurs, up to the last one. Later calls change the counts that are returned."""
        if self._counts is None:
            prompt = self.token_ids[: self.num_prompt_tokens]
            self._counts = TokenCounts(prompt if self.pictures is None else self.pictures.leave_out_rows(prompt))
            self._num_counted_tokens = self.num_prompt_tokens
        self._counts.add_output(self.token_ids[self._num_counted_tokens :])
        self._num_counted_tokens = len(self.token_ids)
        return self._counts

    def count_blocks_needed(self, block_size: int) -> int:
        """Return how many blocks it needs in the end: for every token but the last, whose KV is never read."""
        return -(-(self.num_prompt_tokens + self.max_new_tokens - 1) // block_size)

    def count_computed_rows(self, index: int, block_size: int) -> int:
        """Return how many tokens of the `index`-th block are computed, at least one."""
        num_rows = self.num_computed_tokens - index * block_size
        assert num_rows > 0, f"block {index} of {self!r} holds nothing"
        return min(num_rows, block_size)

    def move_to(self, state: State) -> None:
        """Move to a later state."""
        assert state in _NEXT[self.state], f"{self.id}: {self.state.value} -> {state.value}"
        self.state = state

    def preempt(self) -> None:
        """Go back to waiting with all tokens and no KV. The caller has freed the blocks."""
        assert self.state is State.RUNNING, f"{self.id}: preempted while {self.state.value}"
        self.state = State.WAITING
        self.num_preemptions += 1
        self.num_computed_tokens = 0
        self.block_table = []

    def set_vector(self, vector: NDArray[np.float32]) -> None:
        """Set the vector of a prompt that is computed. It is done."""
        assert self.is_pooled
        self.is_suspect, self.vector = False, vector
        self.move_to(State.DONE)

    def append_token(self, token_id: int) -> None:
        """Append a sampled token. The sequence is no longer suspect then, and done if it was the last one allowed."""
        assert self.state is State.RUNNING
        assert self.num_pending_tokens == 0
        self.is_suspect = False
        self.token_ids.append(token_id)
        if self.grammar is not None:
            with suppress(GrammarFailed):  # the token is in the answer all the same: the next mask fails
                self.grammar.advance([token_id])
        if self.num_output_tokens == self.max_new_tokens:
            self.move_to(State.DONE)


Plan = list[tuple[Sequence, int]]
"""The sequences of one step, with the number of tokens that each computes in it."""


def _compute_mask(grammar: GrammarState) -> NDArray[np.int32]:
    row = np.zeros(grammar.grammar.tokenizer.num_mask_words, np.int32)
    grammar.fill_mask(row)
    return row
