"""The measured speed of one worker of each stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.config.settings import EngineSettings
from penstock.engine.scheduling.cost import StepCost
from penstock.errors import PlanError
from penstock.names import STAGES, find_stages
from penstock.ops.lag import RATE_FIELDS, SERVING_STATES

CHANGES = "a faster device, more threads, a smaller model or a longer limit do"
"""Advice for a limit that more workers cannot meet."""


class DecodeBatch(NamedTuple):
    """The rate of decoding a number of sequences at once."""

    size: int
    tokens_per_s: float
    """Tokens per second of all sequences together."""

    @property
    def step_s(self) -> float:
        """Seconds between two tokens of one sequence."""
        return self.size / self.tokens_per_s


@dataclass(frozen=True)
class WorkerRates:
    """The measured rates of one worker of each stage."""

    source: str
    prefill_tokens_per_s: float
    batches: tuple[DecodeBatch, ...]
    """Rates of decode by batch size, smallest first. Running workers give one."""
    block_size: int
    """Tokens in a KV block."""
    pool_blocks: int | None
    """KV blocks of a decode worker's pool, where that is known."""
    block_bytes: int | None

    def choose_batch(self, itl_s: float) -> DecodeBatch:
        """Return the fastest batch of those that keep to `itl_s`. Raises `PlanError` if none does."""
        within = [one for one in self.batches if one.step_s <= itl_s]
        if not within:
            least = min(one.step_s for one in self.batches)
            raise PlanError(
                f"no measured batch keeps to {itl_s:g} s between tokens, the fastest takes {least:.3g} s: "
                f"more workers do not change that; {CHANGES} (--itl-s, PENSTOCK_SLO_…_ITL_S)"
            )
        return max(within, key=lambda one: one.tokens_per_s)

    def fit_cost(self) -> StepCost:
        """Return the cost of steps that follows from the rates: of decode from the smallest and the largest batch."""
        few, many = self.batches[0], self.batches[-1]
        row_s = max(0.0, many.step_s - few.step_s) / max(1, many.size - few.size)
        return StepCost(max(0.0, few.step_s - few.size * row_s), row_s, 0.0, 0.0, 1 / self.prefill_tokens_per_s)


def average_rates(
    workers: Sequence[Mapping[str, Any]], settings: EngineSettings, model: str | None, *, has_answers: bool = True
) -> WorkerRates:
    """Return the mean rates of the running workers, from their heartbeats. Raises `PlanError` where there are none.
    Without answers, as texts have none, no worker needs to have decoded.

    Heartbeats do not say how the rate of decode depends on the batch. The measured rate is taken for the mean batch
    that runs now, or for a full one if none runs.
    """
    others = [one for one in workers if model not in (None, one.get("model"), one.get("model_source"))]
    wrong = sorted({str(one.get("model")) for one in others})
    if wrong:
        raise PlanError(
            f"the workers of this pipeline serve {', '.join(wrong)}, not {model}: measure it with --measure"
        )
    means: dict[str, float] = {}
    for stage in STAGES if has_answers else STAGES[:1]:
        mine = [
            one
            for one in workers
            if stage in find_stages(one["stage"]) and one["state"] in SERVING_STATES and "load" in one
        ]
        known = [one["load"][RATE_FIELDS[stage]] for one in mine if one["load"][RATE_FIELDS[stage]]]
        if not known:
            raise PlanError(f"no running {stage} worker has measured its rate: send some requests, or use --measure")
        means[stage] = sum(known) / len(known)
    decoding = [one for one in workers if "decode" in find_stages(one["stage"]) and one["state"] in SERVING_STATES]
    running = [one["running"] for one in decoding if one.get("running")]
    size = max(1, round(sum(running) / len(running))) if running else settings.max_batch
    return WorkerRates(
        source=f"{len(workers)} running workers",
        prefill_tokens_per_s=means["prefill"],
        batches=(DecodeBatch(size, means.get("decode", means["prefill"])),),
        block_size=settings.block_size,
        pool_blocks=min((one["pool"]["total"] for one in decoding if "pool" in one), default=None) or None,
        block_bytes=None,
    )
