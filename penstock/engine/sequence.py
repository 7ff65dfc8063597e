"""One request inside the engine: its tokens, how far their KV is computed, and its block table."""

from collections.abc import Iterable
from enum import Enum

from penstock.messages import Sampling
from penstock.names import CLASSES, PriorityClass

Payload = bytes | bytearray | memoryview
"""The KV of one block, all layers, `block_bytes` long."""


class State(Enum):
    """Where a sequence is. It moves forward; only preemption takes it back from RUNNING to WAITING."""

    WAITING = "waiting"
    """Not admitted: holds no blocks."""
    RUNNING = "running"
    """Admitted: holds blocks for the tokens it has, and takes more as it grows."""
    DONE = "done"
    """Has `max_new_tokens` output tokens, or was removed."""


_NEXT = {State.WAITING: (State.RUNNING, State.DONE), State.RUNNING: (State.DONE,), State.DONE: ()}


class Sequence:
    """Prompt, said tokens and generated tokens of one request.

    `given` are output tokens that were said before, by this worker or another: their KV is computed where it
    is missing, but they are never sampled again. `max_new_tokens` counts given and generated tokens together.

    `block_keys[i]` names the content of the i-th full block and of all before it, output tokens included; equal keys
    mean equal KV. `tail` is the KV of the prompt's last block if that is partial, with zeros for the rows beyond the
    prompt. It is consumed at admission, and used if all full blocks before it, and no more, were found in the pool.

    A sequence that is preempted loses its blocks and keeps its tokens: from then on its output so far is as good
    as given. What of its prompt is still in the pool when it is admitted again is not computed again.

    One that is `suspect` shares no step with others until it has passed one that decides a token of it.
    """

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
        klass: PriorityClass = "interactive",
        tenant: str = "",
        weight: float = 1.0,
        suspect: bool = False,
    ) -> None:
        self.id = id
        self.sampling = sampling
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.klass = klass
        self.tenant = tenant
        self.weight = weight
        """Its tenant's share of the tokens where tenants compete."""
        self.suspect = suspect
        """Whether it may make a step fail: it is computed alone until its next token."""
        self.block_keys = list(block_keys)
        self.token_ids = [*prompt, *output_token_ids]
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = 0
        """Leading tokens whose KV is in the pool."""
        self.num_cached_tokens = 0
        """Prompt tokens whose KV was there when it was first admitted: in the pool, or in the tail."""
        self.block_table: list[int] = []
        """Block table: block i holds tokens `i * block_size` and following."""
        self.tail_payload: Payload | None = None
        self.state = State.WAITING
        self.num_preemptions = 0
        self.priority = CLASSES.index(klass)
        """Place of its class, 0 first. The scheduler promotes one that waited for too long to 0."""
        self.is_backfilled = False
        """Whether it passed one of its class that still waits, and has to make way for it."""
        self.arrival_number = 0
        """Arrival number; the scheduler sets it."""
        self.last_scheduled_step = 0
        """The scheduler's step that last computed something of it, or in which it came."""
        assert self.num_prompt_tokens >= 1, "an empty prompt"
        assert self.num_output_tokens < max_new_tokens, "nothing left to generate"

    def __repr__(self) -> str:
        return f"Sequence({self.id!r}, {self.state.value}, {self.num_computed_tokens}/{len(self.token_ids)} tokens)"

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, given ones included; also the position of the next one."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The output tokens so far, given ones included."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def scheduling_order(self) -> tuple[int, bool, int]:
        """Its place among the running; the greatest is preempted first."""
        return self.priority, self.is_backfilled, self.arrival_number

    def count_blocks_needed(self, block_size: int) -> int:
        """Blocks for every token but the last, whose KV nothing reads."""
        return -(-(self.num_prompt_tokens + self.max_new_tokens - 1) // block_size)

    def move_to(self, state: State) -> None:
        """Move forward; anything else is a bug."""
        assert state in _NEXT[self.state], f"{self.id}: {self.state.value} -> {state.value}"
        self.state = state

    def preempt(self) -> None:
        """Go back to waiting, with all tokens and none of their KV. The blocks have been released."""
        assert self.state is State.RUNNING, f"{self.id}: preempted while {self.state.value}"
        self.state = State.WAITING
        self.num_preemptions += 1
        self.num_computed_tokens = 0
        self.block_table = []

    def append_token(self, token_id: int) -> None:
        """Take the sampled token, which clears it; the sequence is done when it was the last one allowed."""
        assert self.state is State.RUNNING
        assert self.num_pending_tokens == 0
        self.suspect = False
        self.token_ids.append(token_id)
        if self.num_output_tokens == self.max_new_tokens:
            self.move_to(State.DONE)
