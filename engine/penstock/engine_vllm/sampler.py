"""The sampler of this project within vLLM: a token depends on its logits, its seed and its position alone.

vLLM is asked for the likeliest token of each row. A custom logits processor draws the token, and makes it
the likeliest. So tokens and log probabilities are those that the engine of this project gives for these logits, and
an answer may go on anywhere.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from penstock.engine.sampling.sampler import SamplingParams, compute_logprobs, find_broken_rows, sample_tokens
from penstock.messages import Logprobs

REQUEST_KEY = "penstock"
"""The extra argument of vLLM's sampling parameters with the id that the sequence has in vLLM."""


@dataclass
class StepSampling:
    """The draws of vLLM's step, before and after it. vLLM makes the processor itself, in the process of each rank."""

    draws: dict[str, SamplingParams] = field(default_factory=dict)
    """By id in vLLM: of the requests that have all their tokens computed in this step."""
    drawn: dict[str, tuple[int, Logprobs | None] | None] = field(default_factory=dict)
    """None for a request that no token can be drawn for: its logits are not finite."""

    def begin(self, draws: dict[str, SamplingParams]) -> None:
        """Begin a step that draws these tokens."""
        self.draws, self.drawn = draws, {}


step_sampling = StepSampling()
"""The step of this process's rank."""


class PenstockSampler(LogitsProcessor):
    """Draws the tokens of a step."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._ids: dict[int, str] = {}
        """By row."""

    def is_argmax_invariant(self) -> bool:
        """Return False: it changes which token is the likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._ids.pop(row, None)
        for row, params, *_ in batch_update.added:
            self._ids[row] = (params.extra_args or {}).get(REQUEST_KEY, "")
        for row, other, direction in batch_update.moved:
            here, there = self._ids.pop(row, None), self._ids.pop(other, None)
            if here is not None:
                self._ids[other] = here
            if direction == MoveDirectionality.SWAP and there is not None:
                self._ids[row] = there

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw the tokens of the rows that have their sequence's last token. `logits`: [rows, vocabulary]."""
        step = step_sampling
        rows = {row: request_id for row, request_id in sorted(self._ids.items()) if request_id in step.draws}
        if rows:
            at = torch.tensor(list(rows), device=logits.device)
            params = [step.draws[request_id] for request_id in rows.values()]
            found = logits if len(rows) == len(logits) else logits[at]
            broken = find_broken_rows(found)
            tokens = sample_tokens(found, params)
            drawn = zip(tokens, compute_logprobs(found, params, tokens), strict=True)
            step.drawn = {
                request_id: None if number in broken else one
                for number, (request_id, one) in enumerate(zip(rows.values(), drawn, strict=True))
            }
            if broken:  # a number that is none would be the likeliest
                logits[at[list(broken)]] = 0.0
            logits[at, torch.tensor(tokens, device=logits.device)] = torch.inf
        return logits
