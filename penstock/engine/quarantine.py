"""What becomes of a step that fails: the culprit is found, and the others go on as if nothing had been.

    a step of several fails ──▶ all are suspects ──▶ each computes alone, until its next token ──▶ cleared
                                                        │ fails
                                                        └──▶ `SequenceFailed`: this one it is

The step is undone before anything here: no token was taken, and what it wrote is computed again. Memory that runs out
is nobody's fault as long as a smaller step is possible: the next one gets half as many tokens, and those after it more
again, bit by bit.

What breaks the device itself is no sequence's to answer for: it is raised as it is, and ends the worker.
"""

import logging
import traceback

import torch

from penstock.engine.scheduler import Plan
from penstock.errors import ModelError, OutOfMemory, RequestError, SequenceFailed

log = logging.getLogger(__name__)

GROWTH_DIVISOR = 16
"""A step that passes makes the next one larger by this share of the most."""


class Quarantine:
    """Judges the failed steps of one engine."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        """What the next step may have at most."""
        self._max_step_tokens = max_tokens

    def record_success(self) -> None:
        """A step was computed."""
        self.max_tokens = min(self._max_step_tokens, self.max_tokens + max(1, self._max_step_tokens // GROWTH_DIVISOR))

    def record_failure(self, plan: Plan, error: Exception) -> None:
        """A step raised this, and was undone. Raises `SequenceFailed` if it is one sequence's, or what it raised."""
        if isinstance(error, torch.AcceleratorError):
            raise error
        cause = _classify_error(error)
        num_tokens = sum(num for _, num in plan)
        if isinstance(cause, OutOfMemory) and num_tokens > 1:
            self.max_tokens = num_tokens // 2
            log.warning("a step of %d tokens takes too much memory (%s), trying fewer", num_tokens, error)
        elif len(plan) > 1:
            for seq, _ in plan:
                seq.suspect = True
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


def _classify_error(error: Exception) -> RequestError:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in text for words in ("can't allocate memory", "not enough memory", "bad_alloc")
    ):
        return OutOfMemory(text)
    return ModelError(text)
