"""A worker's metrics: counts that its loop records, and values that are read whenever metrics are collected."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from penstock.messages import EndEvent, now_s
from penstock.names import PriorityClass, WorkerKind
from penstock.telemetry import catalog
from penstock.telemetry.catalog import PROVIDER, Metric
from penstock.telemetry.energy import EnergyReader
from penstock.telemetry.meters import Histogram, Meters, Reading
from penstock.telemetry.recent import RecentTotals
from penstock.telemetry.seconds import WorkSeconds
from penstock.telemetry.tracing import Operation

TIER_LABELS = {"pool": "pool", "shared": "shm", "disk": "disk", "redis": "redis"}
"""The store's tiers, by their label in the metrics."""
RESULT_LABELS = {"hits": "hit", "misses": "miss", "damaged": "damaged", "evictions": "evicted", "refused": "refused"}
"""The counters of a tier, by their label in the metrics."""
INTERACTIVE_TOTALS = ("ended", "prompts", "prompt_tokens", "squared_prompt_tokens", "cached_tokens")
"""What is counted of interactive requests for the controller, from the start on: requests that ended here, prompts that
were computed, their tokens without those that were found, the squares of these, and the tokens that were found."""
StatusView = Callable[[], Mapping[str, Any]]
"""Returns what a worker holds, as in its heartbeat: `running`, `waiting`, `pool`, `drafts`, `kv`,
`retention`."""


class StageMetrics:
    """One worker's metrics. Only the loop's thread writes them."""

    def __init__(
        self,
        meters: Meters,
        pipeline: str,
        stage: WorkerKind,
        worker: str,
        model: str,
        longest_gap_s: float = math.inf,
    ) -> None:
        """`longest_gap_s`: tokens of interactive answers that come longer after the one before are counted."""
        self._meters, self._pipeline, self._stage, self._worker, self._model = meters, pipeline, stage, worker, model
        self._view: StatusView | None = None
        self._itl = meters.get_histogram(catalog.ITL, pipeline)
        self._longest_gap_s, self._missed = longest_gap_s, meters.get_counter(catalog.GAP_MISSED, pipeline, stage)
        self._prefill, self._cached, self._decode = (
            meters.get_counter(catalog.TOKENS, pipeline, kind) for kind in ("prefill", "cached", "decode")
        )
        self._ended = 0
        self._interactive = dict.fromkeys(INTERACTIVE_TOTALS, 0)
        self._firsts: list[Histogram] = []
        self._num_texts = self._num_text_tokens = 0
        self._text_durations: Histogram | None = None
        self._waits = {
            priority_class: meters.get_histogram(catalog.QUEUE_WAIT, pipeline, stage, priority_class)
            for priority_class in ("interactive", "batch")
        }
        self._preprocess = meters.get_histogram(catalog.PREPROCESS, pipeline)
        self._moves = {
            catalog.KV_READ: meters.get_histogram(catalog.KV_READ, pipeline, stage),
            catalog.KV_WRITE: meters.get_histogram(catalog.KV_WRITE, pipeline, stage),
            catalog.HAND_OFF: meters.get_histogram(catalog.HAND_OFF, pipeline),
        }
        self._take_overs = meters.get_counter(catalog.TAKE_OVERS, pipeline, stage)
        self._dead_letters = meters.get_counter(catalog.DEAD_LETTERS, pipeline, stage)
        self._energy = EnergyReader() if meters.is_on else None
        self.seconds = WorkSeconds()
        self._recent = RecentTotals(self._read_totals)
        meters.add_source(self._read_gauges)

    # As things happen.

    def record_queue_wait(self, priority_class: PriorityClass, published_s: float, begun_s: float) -> None:
        """Record how long a message waited until its work began."""
        self._waits[priority_class].add(max(0.0, begun_s - published_s))

    def record_preprocess(self, duration_s: float) -> None:
        """Record how long a request took to be read."""
        self._preprocess.add(max(0.0, duration_s))

    def record_move(self, metric: Metric, begun_s: float, ended_s: float, trace_id: str = "") -> None:
        """Record how long KV or a request was on its way: `KV_READ`, `KV_WRITE` or `HAND_OFF`."""
        self._moves[metric].add(max(0.0, ended_s - begun_s), trace_id=trace_id)

    def count_take_over(self) -> None:
        """Count a request that was taken over from another worker."""
        self._take_overs.add()

    def count_retry(self, cause: str) -> None:
        """Count a request whose work failed and is tried again later."""
        self._meters.get_counter(catalog.RETRIES, self._pipeline, self._stage, cause).add()

    def count_dead_letters(self, count: int = 1) -> None:
        """Count messages that were put into the dead-letter topic."""
        self._dead_letters.add(count)

    def count_prompt(self, priority_class: PriorityClass, num_computed: int, num_cached: int) -> None:
        """Count the tokens of a prompt that is done."""
        self._prefill.add(num_computed)
        self._cached.add(num_cached)
        if priority_class == "interactive":
            counts = (0, 1, num_computed, num_computed**2, num_cached)
            for name, count in zip(INTERACTIVE_TOTALS, counts, strict=True):
                self._interactive[name] += count

    def count_texts(self, priority_class: PriorityClass, num_texts: int, num_tokens: int) -> None:
        """Count texts that are computed. `count_prompt` counts their tokens too."""
        self._num_texts += num_texts
        self._num_text_tokens += num_tokens
        self._meters.get_counter(catalog.TEXTS, self._pipeline, priority_class).add(num_texts)
        self._meters.get_counter(catalog.TEXT_TOKENS, self._pipeline, priority_class).add(num_tokens)

    def record_first_token(self, operation: Operation, published_s: float, trace_id: str = "") -> None:
        """Record the latency of token 0."""
        found = self._meters.get_histogram(catalog.TIME_TO_FIRST_TOKEN, operation, PROVIDER, self._model)
        if found not in self._firsts:
            self._firsts.append(found)
        found.add(max(0.0, now_s() - published_s), trace_id=trace_id)
        self._decode.add()

    def record_token(self, gap_s: float | None, priority_class: PriorityClass = "batch") -> None:
        """Record a further token, and the time since the one before if this worker wrote that.

        The times of class `batch`, and of servers' answers, may be of any length.
        """
        self._decode.add()
        if gap_s is not None:
            self._itl.add(gap_s)
            if gap_s > self._longest_gap_s and priority_class == "interactive":
                self._missed.add()

    def count_hand_off(self, priority_class: PriorityClass) -> None:
        """Count a request that was handed off."""
        self._meters.get_counter(catalog.REQUESTS, self._pipeline, self._stage, priority_class, "handed_off").add()

    def record_end(
        self, priority_class: PriorityClass, operation: Operation, end: EndEvent, trace_id: str = ""
    ) -> None:
        """Record the end of a request."""
        self._ended += 1
        self._interactive["ended"] += priority_class == "interactive"
        self._meters.get_counter(catalog.REQUESTS, self._pipeline, self._stage, priority_class, end.finish_reason).add()
        times, about = end.timings, (operation, PROVIDER, self._model)
        if times.published:
            code = "" if end.error is None else end.error.code
            duration = self._meters.get_histogram(catalog.REQUEST_DURATION, *about, code)
            duration.add(max(0.0, times.finished - times.published), trace_id=trace_id)
            if operation == "embeddings" and not code:
                self._text_durations = duration
        num_further = end.usage.completion_tokens - 1
        if times.first_token and num_further > 0 and end.error is None:
            each_s = max(0.0, times.finished - times.first_token) / num_further
            self._meters.get_histogram(catalog.TIME_PER_OUTPUT_TOKEN, *about).add(each_s, trace_id=trace_id)

    # Read at each collection of the metrics.

    def set_view(self, view: StatusView) -> None:
        """Read gauges and KV counters from `view`, from now on."""
        self._view = view

    def summarize_recent(self) -> dict[str, Any]:
        """Return the last minute, and the totals since the start, for the heartbeat. For its thread only."""
        return self._recent.summarize_recent() | {"interactive": dict(self._interactive)}

    def _read_totals(self) -> dict[str, float | list[int]]:
        firsts = [histogram.counts for histogram in self._firsts]
        empty = [0] * (len(catalog.FIRST_TOKEN_BOUNDS) + 1)
        durations, no_texts = self._text_durations, [0] * (len(catalog.DURATION_BOUNDS) + 1)
        tokens = {"prefill": self._prefill.value, "cached": self._cached.value, "decode": self._decode.value}
        kv = {} if self._view is None else self._view()["kv"]
        pool = kv.get("pool", {"hits": 0, "misses": 0})
        hits = {f"{name}_hits": kv.get(tier, {}).get("hits", 0) for tier, name in TIER_LABELS.items()}
        return {
            "ttft": [sum(counts) for counts in zip(*firsts, strict=True)] if firsts else empty,
            "itl": list(self._itl.counts),
            "text_s": no_texts if durations is None else list(durations.counts),
            "requests": self._ended,
            "texts": self._num_texts,
            "text_tokens": self._num_text_tokens,
            **tokens,
            **hits,
            "blocks": pool["hits"] + pool["misses"],
        }

    def _read_gauges(self) -> Iterator[Reading]:
        if self._view is None:
            return
        seconds = dict[tuple[str, str], float]()
        for work, spent_s in self.seconds.copy_sums().items():
            what = str(work.stage or "idle"), str(work.priority_class or "")
            seconds[what] = seconds.get(what, 0.0) + spent_s
        for what, spent_s in seconds.items():
            yield Reading(catalog.WORKER_SECONDS, (self._pipeline, self._stage, *what), spent_s)
        yield from self._read_energy()
        view = self._view()
        mine = self._pipeline, self._stage, self._worker
        yield Reading(catalog.RUNNING, mine, view["running"])
        yield Reading(catalog.WAITING, mine, view["waiting"])
        used, total = view["pool"]["used"], view["pool"]["total"]
        yield Reading(catalog.POOL_BLOCKS, (*mine, "used"), used)
        yield Reading(catalog.POOL_BLOCKS, (*mine, "free"), total - used)
        if "slow_products" in view:
            yield Reading(catalog.SLOW_PRODUCTS, mine, view["slow_products"])
        if self._stage in ("decode", "auto"):
            accepted, drafted = view["drafts"]["accepted"], view["drafts"]["drafted"]
            yield Reading(catalog.DRAFTED_TOKENS, (self._pipeline, "accepted"), accepted)
            yield Reading(catalog.DRAFTED_TOKENS, (self._pipeline, "rejected"), drafted - accepted)
        for one in view.get("endpoints", ()):
            place = self._pipeline, self._worker, one["url"], one["cause"]
            yield Reading(catalog.ENDPOINT_REST, place, one["rests_s"])
        if (retention := view.get("retention")) is not None:
            for tenant, num_bytes in retention["bytes"].items():
                yield Reading(catalog.KV_RETAINED, (*mine, tenant), num_bytes)
            for result in ("retained", "found"):
                yield Reading(catalog.KV_RETENTION, (self._pipeline, self._stage, result), retention[result])
        yield from self._read_kv_counters(view["kv"])

    def _read_energy(self) -> Iterable[Reading]:
        joules = None if self._energy is None else self._energy.read_joules()
        return () if joules is None else (Reading(catalog.ENERGY, (self._pipeline, self._worker), joules),)

    def _read_kv_counters(self, kv: Mapping[str, Any]) -> Iterable[Reading]:
        for tier, name in TIER_LABELS.items():
            counters, place = kv.get(tier), (self._pipeline, self._stage, name)
            if counters is None:
                continue
            for counter, result in RESULT_LABELS.items():
                if counter in counters:
                    yield Reading(catalog.KV_BLOCKS, (*place, result), counters[counter])
            if "errors" in counters:
                yield Reading(catalog.KV_ERRORS, place, counters["errors"])
                yield Reading(catalog.KV_BYTES, (*place, "read"), counters["bytes_read"])
                yield Reading(catalog.KV_BYTES, (*place, "written"), counters["bytes_written"])
        if self._stage in ("decode", "auto"):
            yield Reading(catalog.KV_RECOMPUTED, (self._pipeline,), kv["recomputed_blocks"])
