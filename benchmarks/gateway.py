"""The gateway under 1,000 streams at once, and beside a batch job.

python -m benchmarks.gateway [--quick | --smoke] [--json FILE]

The whole pipeline runs behind one gateway process, with the demo model. First, a process sends 1,000 requests at once
and reads their server-sent events from raw sockets, and the same events from Redis' channels: the difference is what
the gateway adds. The decode worker has room for all of them, so each of its steps is 1,000 events in a moment. Memory
is what the gateway's resident set grew by from after a few streams to its peak. Then four interactive streams are read
through the gateway of another pipeline, with the room that workers have by default, in every second window beside a
batch job from an uploaded file, which has more lines than can be answered.
"""

import http.client
import io
import json
import statistics
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from urllib.parse import urlsplit

import numpy as np
import openai
from matplotlib.figure import Figure

from benchmarks.common import TIMEOUT_S, Arguments, run_benchmark, save_plot
from benchmarks.comparison import compute_ratio, draw_tails, measure_in_turns, print_table
from benchmarks.gateway_readers import StreamsRead, make_body, read_streams
from benchmarks.interference import PROMPT_TOKENS, STREAM_NEW, chance, compute_percentile_ms, measure_stream_gaps
from benchmarks.processor import read_resident_bytes
from benchmarks.systems import DEMO_ENVIRONMENT, PipedProcess, draw_tokens, get_gateway_pid, open_stack
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.waiting import wait_until

NUM_STREAMS, NUM_WARM_STREAMS = 1000, 50
NUM_INTERACTIVE, BATCH_ANSWER_TOKENS = 4, (16, 96)
"""Streams beside a batch job, and the fewest and most tokens of an answer of the job's."""
_LARGE_ENVIRONMENT = DEMO_ENVIRONMENT | {
    "PENSTOCK_ENGINE_MAX_BATCH": "1024", "PENSTOCK_ENGINE_POOL_MB": "512", "PENSTOCK_ENGINE_MAX_STEP_TOKENS": "2048",
    "PENSTOCK_GATEWAY_MAX_WAIT_S": "600",
}  # fmt: skip
_JOB_LINES = 4000
"""Lines of the batch job: more than a window can answer, even if all that are open have capacity."""
ALONE, BUSY = "alone", "beside a batch job"
_END_STATUSES = ("completed", "failed", "cancelled", "expired")


def run(given: Arguments) -> dict[str, float]:
    """Measure, print and draw; return the figures."""
    tokens, rounds, pairs, seconds = given.choose_size((128, 3, 6, 8.0), (32, 1, 2, 3.0), (4, 1, 1, 0.2))
    large = (NUM_STREAMS, NUM_WARM_STREAMS, _JOB_LINES)
    count, warm_count, job_lines = given.choose_size(large, large, (8, 8, 400))
    how = given.choose_stack()
    with open_stack(how, _LARGE_ENVIRONMENT, gateway=find_free_port()) as stack:
        run_round(stack, warm_count, tokens)
        rss_kb = read_resident_bytes([get_gateway_pid(stack)]) / 1024
        seen, peaks_kb = zip(*(run_round(stack, count, tokens) for _ in range(rounds)), strict=True)
    added_ms = [one.list_added_ms() for one in seen]
    with open_stack(how, DEMO_ENVIRONMENT, gateway=find_free_port()) as stack:
        side = GatewaySide(stack.gateway_url, job_lines)
        sides = {name: partial(side.run_window, seconds, is_busy=name == BUSY) for name in (ALONE, BUSY)}
        gaps = measure_in_turns(sides, pairs, "windows")
    slowest = {name: [compute_percentile_ms(one, 99) for one in found] for name, found in gaps.items()}
    print(f"demo model, float32, {count} streams of {tokens} tokens")
    print_table(slowest, "ms, ITL p99")
    if given.is_full:
        draw_plot(added_ms, gaps)
    return {
        "sse_streams_ok": min(one.count_whole() for one in seen),
        "sse_mem_kb_per_stream": (max(peaks_kb) - rss_kb) / count,
        "sse_added_ms_p50": statistics.median(float(np.percentile(one, 50)) for one in added_ms),
        "sse_added_ms_p99": statistics.median(float(np.percentile(one, 99)) for one in added_ms),
        "batch_interference_itl_p99_ratio": compute_ratio(slowest, BUSY, ALONE),
    }


def run_round(stack: Stack, count: int, tokens: int) -> tuple[StreamsRead, float]:
    """Open `count` streams at once; return what came of them, and the gateway's peak resident memory in KiB."""
    bodies = [make_body(f"{number}: In the beginning", tokens) for number in range(count)]
    address, port = urlsplit(stack.addresses.stream_url), urlsplit(stack.gateway_url).port
    reading = port, bodies, (address.hostname, address.port), stack.addresses.pipeline
    rss_bytes = 0
    with closing(PipedProcess(get_context("fork"), read_streams, *reading)) as reader:
        reader.send("begin")
        while not reader.has_answer(0.1):
            rss_bytes = max(rss_bytes, read_resident_bytes([get_gateway_pid(stack)]))
        read: StreamsRead = reader.receive()
    print(f"{count} streams: {read.count_whole()} whole", *read.problems[:3], sep="\n  ", flush=True)
    return read, rss_bytes / 1024


class GatewaySide:
    """The pipeline as a client of the gateway sees it. A window's job is cancelled after it."""

    def __init__(self, url: str, job_lines: int) -> None:
        self._job_lines, self._address = job_lines, urlsplit(url).netloc
        self._sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=TIMEOUT_S)

    def run_window(self, seconds: float, _: int, *, is_busy: bool) -> list[float]:
        """Return the gaps between the streams' tokens in a window."""
        job = self._start_job() if is_busy else None
        gaps_s = measure_stream_gaps(self._stream_answer, seconds, NUM_INTERACTIVE)
        if job is not None:
            self._sdk.batches.cancel(job)
            wait_until(lambda: self._sdk.batches.retrieve(job).status in _END_STATUSES, TIMEOUT_S, "its end", 0.1)
        return gaps_s

    def _start_job(self) -> str:
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions",
             "body": {"model": "demo", "prompt": draw_tokens(chance, PROMPT_TOKENS),
                      "max_tokens": chance.randint(*BATCH_ANSWER_TOKENS), "ignore_eos": True}}
            for number in range(self._job_lines)
        ]  # fmt: skip
        content = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        file = self._sdk.files.create(file=("job.jsonl", content), purpose="batch")
        job = self._sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        def has_begun() -> bool:
            counts = self._sdk.batches.retrieve(job.id).request_counts
            return counts is not None and counts.completed > 0

        wait_until(has_begun, TIMEOUT_S, "the first line is answered", every_s=0.1)
        return job.id

    def _stream_answer(self) -> Iterator[object]:
        headers = {"Content-Type": "application/json", "x-penstock-cancel-on-disconnect": "true"}
        with closing(http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)) as connection:
            body = make_body(draw_tokens(chance, PROMPT_TOKENS), STREAM_NEW, temperature=0)
            connection.request("POST", "/v1/completions", body, headers)
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    yield line


def draw_plot(added_ms: list[list[float]], gaps: dict[str, list[list[float]]]) -> None:
    """Draw the time that the gateway added to each event, and gaps with and without a batch job."""
    figure = Figure(figsize=(9, 3.6))
    left, right = figure.subplots(1, 2, sharey=True)
    by_round = {f"round {number}": found for number, found in enumerate(added_ms, 1)}
    draw_tails(left, by_round, f"{NUM_STREAMS} streams at once", "added to reading from Redis, ms")
    gaps_ms = {name: [gap * 1000 for one in found for gap in one] for name, found in gaps.items()}
    draw_tails(right, gaps_ms, "four streams through the gateway", "inter-token latency, ms")
    left.set_ylabel("share of events above")
    save_plot(figure, "gateway")


if __name__ == "__main__":
    run_benchmark(__doc__, run)
