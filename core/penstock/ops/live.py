"""The state of the pipeline now, as one JSON object: what the page and `penstock top` show.

It comes from the topics and the workers' heartbeats, so all viewers see the same. Only lost workers are known to those
viewers alone that saw them alive.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import redis

from penstock.bus.contract import Bus
from penstock.bus.lost import describe_lost, read_lost
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.names import CLASSES, WHOLE_KINDS, WorkerKind, find_stages
from penstock.ops.account import Prices, TodaysAccount
from penstock.ops.eviction import LOOK_S, describe_eviction, measure_memory
from penstock.ops.lag import RATE_FIELDS, PipelineWatch, compute_lag
from penstock.ops.status import assess_health, read_heartbeats
from penstock.telemetry import catalog
from penstock.telemetry.recent import sum_buckets, sum_values, summarize_percentiles
from penstock.telemetry.stage import TIER_LABELS

Json = dict[str, Any]
LOST_SHOWN_S = 60.0
"""Seconds for which a worker is shown that vanished without a normal shutdown."""


class LiveWatch(PipelineWatch[Json]):
    """Reads the state of the pipeline as one JSON object.

    `tiers`: of the prompt blocks that prefill wanted within the last minute, how many each tier had. `ttft_s`, `itl_s`
    and `text_s` (of requests with texts, from submission to end): of the last minute; `rates`, and a worker's
    `tokens_per_s` and `texts_per_s`: of the last ten seconds. `scaling`: the controller's last decision
    (`penstock.autoscale.service.build_told`), None where none runs. `regions`: as a gateway sees them, where there are
    any. `account`, where there are prices: of today, in UTC.
    """

    def __init__(self, addresses: Addresses, settings: BusSettings, prices: Prices | None = None) -> None:
        super().__init__(addresses, settings)
        self._account = None if prices is None else TodaysAccount(prices)
        self.eviction, self._eviction_asked_at = "", -LOOK_S
        """The stream servers that evict, as of a minute ago at most; empty if none does."""
        self.memory_share: float | None = None
        """The share of its memory limit that the fullest stream server uses, as of a minute ago at most."""
        self.lost: dict[str, int] = {}
        """The number of messages of each topic that were deleted unanswered, within about a week."""
        self._seen: dict[tuple[str, str], float] = {}
        """The time at which each worker's heartbeat was last found."""

    def _read_now(self, bus: Bus) -> Json:
        if time.monotonic() >= self._eviction_asked_at + LOOK_S:
            self._eviction_asked_at, self.eviction = time.monotonic(), describe_eviction(self._addresses)
            self.memory_share = measure_memory(self._addresses)
        workers = read_heartbeats(self._redis, self._pipeline)
        lag = compute_lag(self._pipeline, bus.count_unsettled(), workers)
        self.lost = read_lost(self._redis, self._pipeline)
        scaling, regions = cast(Any, self._redis.mget(self._pipeline.autoscale_key, self._pipeline.regions_key))
        seconds, microseconds = self._redis.time()
        now_s, health = seconds + microseconds / 1e6, assess_health(workers, self.eviction)
        return {
            "at": now_s,
            "pipeline": self._pipeline.name,
            "health": {"state": health.state, "reasons": [*health.reasons, *describe_lost(self.lost)]},
            "lag": lag.as_json(),
            "workers": [build_worker_json(worker, now_s) for worker in workers],
            "lost": self._list_lost_workers({(worker["stage"], worker["name"]) for worker in workers}, self._redis),
            # Without what the controller remembers; None where none runs.
            "scaling": scaling and {name: value for name, value in json.loads(scaling).items() if name != "state"},
            "regions": json.loads(regions or b"[]"),
            **build_recent_json(workers),
            **self._build_account_json(),
        }

    def _build_account_json(self) -> Json:
        if self._account is None:
            return {}
        totals = self._account.read_totals(self._redis, self._pipeline)
        return {"account": {"currency": self._account.prices.currency, **totals}}

    def _list_lost_workers(self, there: set[tuple[str, str]], client: "redis.Redis") -> list[Json]:
        now = time.monotonic()
        self._seen |= dict.fromkeys(there, now)
        gone = sorted(self._seen.keys() - there)
        if gone:
            with client.pipeline(transaction=False) as pipe:
                for stage, name in gone:
                    pipe.exists(self._pipeline.left_key(stage, name))
                goodbyes = pipe.execute()
            for worker, has_left in zip(gone, goodbyes, strict=True):
                if has_left or now > self._seen[worker] + LOST_SHOWN_S:
                    del self._seen[worker]
        ages = {worker: round(now - self._seen[worker], 1) for worker in gone if worker in self._seen}
        return [{"stage": stage, "name": name, "seen_s_ago": age_s} for (stage, name), age_s in ages.items()]


def build_worker_json(worker: Mapping[str, Any], now_s: float) -> Json:
    """Return a worker's state, from its heartbeat."""
    per_s = worker.get("recent", {}).get("per_s", {})
    pool = worker.get("pool", {"used": 0, "total": 0})
    is_loading = worker["state"] == "loading"
    return {
        "stage": worker["stage"],
        "name": worker["name"],
        "host": worker["host"],
        "state": worker["state"],
        "reason": worker.get("reason") or None,
        "progress": worker.get("progress") if is_loading else None,
        "running": worker.get("running", 0),
        "waiting": worker.get("waiting", 0),
        "prompts_s": estimate_prompts_s(worker),
        "tokens_per_s": _sum_tokens_per_s(worker["stage"], per_s),
        "texts_per_s": per_s.get("texts"),
        "blocks_used": pool["used"],
        "blocks_total": pool["total"],
        "resting": [one for one in worker.get("endpoints", ()) if one["cause"]],
        "age_s": round(max(0.0, now_s - worker["since"]), 1),
    }


def _sum_tokens_per_s(kind: WorkerKind, per_s: Mapping[str, float]) -> float | None:
    """Return the rate of a worker's last stage; in decode with the tokens of texts, which have no answer of tokens."""
    stage = find_stages(kind)[-1]
    if stage not in per_s:
        return None
    return per_s[stage] + (per_s.get("text_tokens", 0.0) if stage == "decode" else 0.0)


def estimate_prompts_s(worker: Mapping[str, Any]) -> float | None:
    """Return how long a worker will compute the prompts that wait for it; None where that is not known.

    Prompts of unread messages in its partitions count too, each with the mean length of the prompts that it computed.
    """
    load = worker.get("load", {})
    per_s = load.get(RATE_FIELDS["prefill"])
    if "prefill" not in find_stages(worker["stage"]) or not per_s:
        return None
    num_tokens: int = sum(load[priority_class].get("waiting_tokens", 0) for priority_class in CLASSES)
    return round(num_tokens / float(per_s), 3)


def build_recent_json(workers: Iterable[Mapping[str, Any]]) -> Json:
    """Return latencies and rates of the last minute, over all workers."""
    recent = [(worker["stage"], worker["recent"]) for worker in workers if "recent" in worker]
    minutes, paces = [one["minute"] for _, one in recent], [one["per_s"] for _, one in recent]
    prefill = [one["minute"] for kind, one in recent if "prefill" in find_stages(kind) and kind not in WHOLE_KINDS]
    return {
        "tiers": build_tiers_json(prefill),
        "ttft_s": _sum_percentiles(minutes, "ttft", catalog.FIRST_TOKEN_BOUNDS),
        "itl_s": _sum_percentiles(minutes, "itl", catalog.ITL_BOUNDS),
        "text_s": _sum_percentiles(minutes, "text_s", catalog.DURATION_BOUNDS),
        "rates": {
            "requests_per_s": sum_values(paces, "requests"),
            "prefill_tokens_per_s": sum_values(paces, "prefill"),
            "cached_tokens_per_s": sum_values(paces, "cached"),
            "decode_tokens_per_s": sum_values(paces, "decode"),
            "texts_per_s": sum_values(paces, "texts"),
        },
    }


def build_tiers_json(minutes: Sequence[Mapping[str, Any]]) -> Json:
    """Return how many of the wanted blocks each tier had."""
    wanted = sum_values(minutes, "blocks")
    hits = {tier: int(sum_values(minutes, f"{tier}_hits")) for tier in TIER_LABELS.values()}
    return {tier: {"hits": count, "share": count / wanted if wanted else None} for tier, count in hits.items()}


def _sum_percentiles(minutes: Sequence[Mapping[str, Any]], name: str, bounds: Sequence[float]) -> Json:
    return summarize_percentiles(bounds, sum_buckets(minutes, name, bounds))
