"""How many of the requests that wait in a stream a worker leaves to faster ones.

All workers that read requests pull from one stream, and none of them places. A request that a slow worker has taken
nobody else begins, though a faster one may have time a moment later. So a worker takes only as many as get their first
token sooner there than the last one that is left gets it from the faster ones, which have what waits in them and in the
stream to do before. Speeds and loads are those of the last heartbeats. What is not known holds nothing back: without
fresh heartbeats of itself and of a faster worker, a worker takes all that it has capacity for. A message that has
waited for as long as heartbeats last is taken by any worker.
"""

from collections.abc import Iterable
from typing import NamedTuple

from penstock.bus.placement import WorkerBeat

FASTER = 1.5
"""By what factor a worker is at least slower that leaves requests. Measurements of equal workers differ by less."""
PROMPT_TOKENS = 256
"""Of a request, where no worker has told its mean."""


class Share(NamedTuple):
    """What a worker may take of the messages that wait: (their number + `ahead`) * `part`, rounded down."""

    ahead: float
    part: float
    max_wait_s: float
    """A message that has waited for longer is taken by any worker."""


def find_share(worker: str, beats: Iterable[WorkerBeat], taken_s: Iterable[float], now_s: float) -> Share | None:
    """Return what a worker may take that took messages at these times since its heartbeat; None if it may take all.

    Of m messages it takes j so that the j-th is done here no later than the last of the others elsewhere:

        step + (own + j * prompt) * token <= step' + (others + (m - j) * prompt) / rate + prompt * n / rate

    Here own and others are the tokens that wait in this worker now and in the n faster ones, and rate is the sum of
    their tokens a second.
    """
    fresh = {beat.worker: beat for beat in beats if now_s < beat.stale_s and beat.speed is not None}
    if (mine := fresh.get(worker)) is None or mine.speed is None:
        return None
    token_s, speeds, waiting, lasts_s = mine.speed.prompt_token_s, [], 0, 0.0
    for beat in fresh.values():
        if beat.takes_requests and beat.speed is not None and FASTER * beat.speed.prompt_token_s <= token_s:
            speeds.append(beat.speed)
            waiting += beat.waiting_tokens["interactive"]
            lasts_s = max(lasts_s, beat.stale_s - beat.at_s)
    if not speeds:
        return None
    means = [beat.mean_prompt_tokens for beat in fresh.values() if beat.mean_prompt_tokens]
    prompt_tokens = sum(means) / len(means) if means else PROMPT_TOKENS
    rate = sum(1 / speed.prompt_token_s for speed in speeds)
    steps = [speed.estimate_step_s() or 0.0 for speed in speeds]
    own_s, at_s = mine.waiting_tokens["interactive"] * token_s, mine.at_s
    for taken_at_s in taken_s:  # it computes meanwhile
        own_s, at_s = max(0.0, own_s - max(0.0, taken_at_s - at_s)) + prompt_tokens * token_s, max(at_s, taken_at_s)
    own_s = max(0.0, own_s - (now_s - at_s))
    own_s += max(0.0, (mine.speed.estimate_step_s() or 0.0) - sum(steps) / len(steps))
    return Share(len(speeds) + (waiting - rate * own_s) / prompt_tokens, 1 / (1 + rate * token_s), lasts_s)
