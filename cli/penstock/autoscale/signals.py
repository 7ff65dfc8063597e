"""The controller's view: topics and heartbeats at one moment, and arrivals and prompts since the look before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.autoscale.controller import Seen, Workers
from penstock.autoscale.sizing import Load, Speed, Targets
from penstock.autoscale.windows import Passed
from penstock.bus.contract import Bus
from penstock.names import CLASSES, Pipeline, WorkerKind, find_stages
from penstock.ops.lag import SERVING_STATES, PipelineWatch, compute_lag
from penstock.ops.status import read_heartbeats
from penstock.telemetry.stage import INTERACTIVE_TOTALS, TIER_LABELS
from penstock.worker_speed import WorkerSpeed

Beat = Mapping[str, Any]
SCALED_KINDS: tuple[WorkerKind, ...] = ("auto", "prefill", "decode")
"""The kinds whose numbers are decided. An `endpoint` worker computes nothing, and one is enough."""


@dataclass(frozen=True)
class Look:
    """Topics and heartbeats at one moment."""

    at_s: float
    """By the clock of Redis."""
    unsettled: Mapping[str, int]
    beats: Sequence[Beat]
    lost: Mapping[WorkerKind, int] = field(default_factory=dict)
    """How many workers vanished since the look before without a goodbye."""


class SignalWatch(PipelineWatch[Look]):
    """Looks at a pipeline."""

    _serving: frozenset[tuple[WorkerKind, str]] = frozenset()

    def expect_workers(self, names: Mapping[WorkerKind, Sequence[str]]) -> None:
        """Take these for the workers that served at the look before, which another process made."""
        self._serving = frozenset((kind, name) for kind, ones in names.items() for name in ones)

    def _read_now(self, bus: Bus) -> Look:
        unsettled, beats = bus.count_unsettled(), read_heartbeats(self._redis, self._pipeline)
        seconds, microseconds = self._redis.time()
        before, self._serving = (
            self._serving,
            frozenset((one["stage"], one["name"]) for one in beats if one["state"] in SERVING_STATES),
        )
        gone = sorted(before - {(one["stage"], one["name"]) for one in beats})
        lost = dict[WorkerKind, int]()
        for kind, name in gone:
            if not self._redis.exists(self._pipeline.left_key(kind, name)):
                lost[kind] = lost.get(kind, 0) + 1
        return Look(seconds + microseconds / 1e6, unsettled, beats, lost)


def find_signals(look: Look, before: Look | None, pipeline: Pipeline, targets: Targets, block_size: int) -> Seen:
    """Return what the controller needs to know. Without a look before, what passed is not known."""
    mine = [one for one in look.beats if one["stage"] in SCALED_KINDS]
    serving = [one for one in mine if one["state"] in SERVING_STATES]
    lag = compute_lag(pipeline, look.unsettled, mine)
    token_s = _find_token_seconds(serving)
    speed = find_speed([one for one in serving if "decode" in find_stages(one["stage"])], targets, block_size)
    backlog, output_tokens = lag.stages["prefill"]["interactive"].prompt_tokens, lag.mean_output_tokens["interactive"]
    prompt_tokens = _compute_mean(one["load"]["interactive"].get("mean_prompt_tokens") for one in serving)
    missing = [f"{one['name']} tells no totals (its telemetry is off)" for one in serving if not _read_totals(one)]
    passed = None
    if before is not None and (token_s is not None or not serving):
        passed = _find_passed(look, before, token_s or 0.0, pipeline)
    load = None
    if None not in (token_s, output_tokens, prompt_tokens, backlog):
        assert token_s is not None
        assert output_tokens is not None
        batch = [stage["batch"] for stage in lag.stages.values()]
        batch_s, answers_s = sum(one.prompt_tokens or 0 for one in batch) * token_s, 0.0
        if speed is not None:
            answers_s = (lag.stages["prefill"]["interactive"].output_tokens or 0) / speed.tokens_per_s
            batch_s += sum(one.output_tokens or 0 for one in batch) / speed.tokens_per_s
        load = Load(
            0.0, 0.0, 0.0, output_tokens, (prompt_tokens or 0) + output_tokens,
            backlog_s=(backlog or 0) * token_s, waiting_answers_s=answers_s, batch_s=batch_s,
        )  # fmt: skip
    return Seen(
        look.at_s,
        _list_workers(mine, look),
        passed,
        sum(look.unsettled.values()),
        load,
        speed,
        tuple(missing),
    )


def _list_workers(mine: Sequence[Beat], look: Look) -> dict[WorkerKind, Workers]:
    kinds = sorted({one["stage"] for one in mine} | look.lost.keys(), key=SCALED_KINDS.index)
    return {
        kind: Workers(
            tuple(one["name"] for one in mine if one["stage"] == kind and one["state"] in SERVING_STATES),
            tuple(look.at_s - one["since"] for one in mine if one["stage"] == kind and one["state"] == "loading"),
            look.lost.get(kind, 0),
        )
        for kind in kinds
    }


def _read_totals(beat: Beat) -> Mapping[str, float]:
    found: Mapping[str, float] = beat.get("recent", {}).get("interactive", {})
    return found


def _find_passed(look: Look, before: Look, token_s: float, pipeline: Pipeline) -> Passed:
    """Return what happened between two looks. Arrivals are what ended and by how much more is not settled."""
    known = {(one["stage"], one["name"], one["token"]): _read_totals(one) for one in before.beats}
    sums = dict.fromkeys(INTERACTIVE_TOTALS, 0.0)
    for one in look.beats:
        earlier = known.get((one["stage"], one["name"], one["token"]))
        if earlier is None and one["since"] < before.at_s:
            continue  # what it did before it was seen is not known
        for name, total in _read_totals(one).items():
            sums[name] += total - (earlier or {}).get(name, 0)
    topics = [pipeline.request_topic("interactive"), pipeline.job_topic("interactive")]
    arrived = sums["ended"] + sum(look.unsettled[topic] - before.unsettled[topic] for topic in topics)
    hit_s = sums["cached_tokens"] * token_s * _find_pool_share(look.beats)
    prompt_s, prompt_s2 = sums["prompt_tokens"] * token_s, sums["squared_prompt_tokens"] * token_s**2
    return Passed(look.at_s, look.at_s - before.at_s, arrived, sums["prompts"], prompt_s, prompt_s2, hit_s)


def _find_pool_share(beats: Sequence[Beat]) -> float:
    """Return the share of the found blocks of the last minute that were in a worker's own pool."""
    minutes = [one["recent"]["minute"] for one in beats if "recent" in one]
    hits = {tier: sum(one.get(f"{tier}_hits", 0) for one in minutes) for tier in TIER_LABELS.values()}
    return float(hits["pool"] / max(1, sum(hits.values())))


def _find_token_seconds(serving: Sequence[Beat]) -> float | None:
    """Return how long a prompt token takes on a worker without answers, on the mean of those that compute prompts."""
    readers = [one for one in serving if "prefill" in find_stages(one["stage"]) and "load" in one]
    speeds = [WorkerSpeed.parse(one["load"].get("speed")) for one in readers]
    return _compute_mean(one and one.idle_prompt_token_s * (one.slowdown or 1.0) for one in speeds)


def find_speed(serving: Sequence[Beat], targets: Targets, block_size: int) -> Speed | None:
    """Return what a worker decodes, on the mean of those that decode; None where that is not known.

    Where the cost of a step is not known, it is the highest rate among them.
    """
    found, rates = list[tuple[float, float, float, float]](), list[float]()
    for one in serving:
        load = one.get("load", {})
        speed = WorkerSpeed.parse(load.get("speed"))
        rates += [load["output_tokens_per_s"]] if load.get("output_tokens_per_s") else []
        if speed is not None and speed.step_s is not None and speed.row_s is not None:
            most = max(1, one.get("running", 0) + load["interactive"]["capacity"])
            rows = max(1, min(most, int((targets.gap_s - speed.step_s) / speed.row_s)))
            pool = one.get("pool", {}).get("total", 0) * block_size
            found.append((rows, speed.step_s + rows * speed.row_s, speed.row_s, pool))
    if found:
        rows, step_s, row_s, pool = (sum(values) / len(found) for values in zip(*found, strict=True))
        return Speed(rows, step_s, row_s, pool or float("inf"))
    return Speed(1, 1 / max(rates)) if rates else None


def choose_leaver(beats: Sequence[Beat], kind: WorkerKind) -> str | None:
    """Return the name of the worker of a kind with the least to lose; None if there is none."""
    mine = [one for one in beats if one["stage"] == kind and one["state"] != "draining"]
    return min(mine, key=_measure_loss)["name"] if mine else None


def _measure_loss(beat: Beat) -> tuple[bool, int, int]:
    """Return whether a worker serves, how many requests run there, and the tokens that it has left."""
    load = beat.get("load", {})
    left = sum(load[one]["prompt_tokens"] + load[one]["output_tokens"] for one in CLASSES if one in load)
    return beat["state"] in SERVING_STATES, beat.get("running", 0), left


def _compute_mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
