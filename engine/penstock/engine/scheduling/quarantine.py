"""Handle steps that fail: find the sequence at fault, so that the others go on unharmed.

    a step of several fails ──▶ all are suspects ──▶ each computes alone, until its next token ──▶ cleared
                                                        │ fails
                                                        └──▶ `SequenceFailed` for this one

The engine undoes the step first: no token was sampled, and the KV that it wrote is computed again. Running out of
memory is no sequence's fault as long as a smaller step is possible: the next step gets half as many tokens, and the
steps after it get more again, bit by bit.

An error of the device itself is raised unchanged and ends the worker.
"""

import logging
import traceback

import torch

from penstock.engine.sequence import Plan
from penstock.errors import ModelError, OutOfMemory, RequestError, SequenceFailed

log = logging.getLogger(__name__)

GROWTH_DIVISOR = 64
"""A step that succeeds makes the next one larger by the maximum divided by this."""


class Quarantine:
    """Decides what to do after the failed steps of one engine."""

    def __init__(self, max_tokens: int, min_tokens: int = 1) -> None:
        """`min_tokens`: the fewest tokens that a step of a prompt can have."""
        self.max_tokens = max_tokens
        """How many tokens the next step may have."""
        self._max_step_tokens, self._min_step_tokens = max_tokens, min_tokens

    def record_success(self) -> None:
        """Note that a step succeeded."""
        self.max_tokens = min(self._max_step_tokens, self.max_tokens + max(1, self._max_step_tokens // GROWTH_DIVISOR))

    def record_failure(self, plan: Plan, error: BaseException) -> None:
        """Judge a step that raised `error` and was undone.

        Raises `SequenceFailed` if one sequence is at fault, or `error` if it is one of the device.
        """
        if isinstance(error, torch.AcceleratorError):
            raise error
        cause = _classify_error(error)
        num_tokens = sum(num for _, num in plan)
        if isinstance(cause, OutOfMemory) and num_tokens > self._min_step_tokens:
            self.max_tokens = num_tokens // 2
            log.warning("a step of %d tokens takes too much memory (%s), trying fewer", num_tokens, error)
        elif len(plan) > 1:
            for seq, _ in plan:
                seq.is_suspect = True
            log.warning("a step of %d sequences failed, trying them one by one", len(plan), exc_info=error)
        else:
            ((seq, _),) = plan
            log.warning("%s: its step failed", seq.id, exc_info=error)
            cause.stack = "".join(traceback.format_exception(error))
            raise SequenceFailed(seq, cause) from None
        # The frames hold the step's tensors.
        traceback.clear_frames(error.__traceback__)
        if isinstance(cause, OutOfMemory) and torch.cuda.is_available():
            torch.cuda.empty_cache()


def _classify_error(error: BaseException) -> RequestError:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in text for words in ("can't allocate memory", "not enough memory", "bad_alloc")
    ):
        return OutOfMemory(text)
    return ModelError(text)
