"""What the tiers of the KV store cost: blocks moved through each, against the plain way to move the same bytes.

python -m benchmarks.kv [--quick | --smoke] [--json FILE]

Blocks have the size of 16 tokens of the 0.6B shape in bf16 (1.75 MiB), 64 MB of them a round. In each round all sides
take turns, forwards and backwards; ratios are formed within it, and the median of the rounds is told.

    shm     written by this process, read by another one, as seen from here, with the word to the other process and its
            answer; against two plain copies in one process, into a buffer and out of it
    redis   read over a unix socket and over TCP; against a plain socket that sends the same GETs to the same server and
            receives the replies side by side in one buffer, looking at nothing; `_drained`: each reply over the one
            before, so that nothing leaves the caches
    disk    read while the page cache has the files (warm), against `preadv` of the same files side by side into one
            buffer; `disk_cold_vs_read`: both after the page cache was told to forget the files
    LMCache its remote backend on the same server over TCP, without an engine, put and get of the same bytes: with its
            asyncio connector (`redis://`), in chunks of 256 tokens, its default, and of 16, of which the faster counts;
            and with the one in C++ (`resp://`, eight connections), the same way. It does not check what it reads. Ours
            does, and keeps the budget. (`python -m benchmarks.peers.setup` installs it.)

Then puts and gets of one block at a time, by its size: p50 and p99 in microseconds.
"""

import contextlib
import statistics

from matplotlib.figure import Figure

from benchmarks.common import Arguments, describe_machine, format_spread, parse_arguments, report_figures, save_plot
from benchmarks.kv_rounds import BLOCK_SIZES, KVBench, KVRounds
from benchmarks.peers.process import SideFailed, is_available

SIDES_BY_RATIO = {
    "shm_vs_memcpy": ("shm", "memcpy"),
    "redis_unix_vs_socket": ("redis unix", "socket unix"),
    "redis_tcp_vs_socket": ("redis tcp", "socket tcp"),
    "disk_vs_read": ("disk warm", "preadv warm"),
    "redis_unix_vs_socket_drained": ("redis unix", "socket unix drained"),
    "redis_tcp_vs_socket_drained": ("redis tcp", "socket tcp drained"),
    "disk_cold_vs_read": ("disk cold", "preadv cold"),
}
TIERS = ("shm", "disk", "redis_unix", "redis_tcp")


def compare_with_lmcache(bench: KVBench, moved: KVRounds) -> dict[str, float]:
    """Return the ratios to LMCache; none if it does not run."""
    if not is_available("lmcache"):
        print("without LMCache: `python -m benchmarks.peers.setup` installs it")
        return {}
    try:
        bench.measure_lmcache(moved)
    except SideFailed as failed:
        print(f"without LMCache: {failed}")
        return {}
    sides = [side for side in moved.seconds if side.startswith("LMCache") and not side.endswith((" put", " get"))]
    figures = {}
    for name, scheme in (("redis_vs_lmcache", "LMCache redis"), ("redis_vs_lmcache_resp", "LMCache resp")):
        figures[name] = min(moved.compute_ratio("ours", side) for side in sides if side.startswith(scheme))
    return figures


def run(given: Arguments) -> dict[str, float]:
    """Measure, print and draw; return the figures."""
    read, moved = KVRounds(), KVRounds()
    with contextlib.ExitStack() as exits:
        bench = KVBench(exits, *given.choose_size((25, 400), (7, 60), (1, 2)))
        bench.measure_shared_memory(read)
        for name in ("unix", "tcp"):
            bench.measure_redis(read, name)
        bench.measure_disk(read)
        compared = compare_with_lmcache(bench, moved)
        latencies = bench.measure_latencies()
    print(f"\n{describe_machine()}; GB/s")
    for rounds in (read, moved):
        for side in rounds.seconds:
            print(f"{side:32} {format_spread(rounds.compute_speeds(side))}")
    figures = {name: read.compute_ratio(*sides) for name, sides in SIDES_BY_RATIO.items()} | compared
    figures |= {f"{side.replace(' ', '_')}_gb_s": statistics.median(read.compute_speeds(side)) for side in read.seconds}
    if given.is_full:
        draw_plot(read, moved, latencies)
    return figures | latencies


def draw_plot(read: KVRounds, moved: KVRounds, latencies: dict[str, float]) -> None:
    """Draw the speed of every side in every round, and the latencies by size."""
    figure = Figure(figsize=(13, 4.6))
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.4, 1, 1))
    shown = [side for side in read.seconds if not side.endswith("drained") and side not in ("shm put", "shm get")]
    speeds = {side: read.compute_speeds(side) for side in shown}
    speeds |= {
        f"{side}, put and get": moved.compute_speeds(side)
        for side in moved.seconds
        if not side.endswith(("put", "get"))
    }
    left.boxplot(list(speeds.values()), tick_labels=list(speeds), orientation="horizontal")
    left.set(title="64 MB in blocks of 1.75 MiB", xlabel="GB/s", xlim=(0, None))
    left.invert_yaxis()
    for axis, what in ((middle, "get"), (right, "put")):
        for number, tier in enumerate(TIERS):
            for percent, line in ((50, "-"), (99, ":")):
                values = [latencies[f"{tier}_{what}_p{percent}_us_{label}"] for label in BLOCK_SIZES]
                name = tier.replace("_", " ") if percent == 50 else None
                axis.plot(list(BLOCK_SIZES.values()), values, line, color=f"C{number}", label=name)
        axis.set(xscale="log", yscale="log", title=f"one {what}, p50 and p99 (dotted)", xlabel="bytes of the block")
        axis.set_xticks(list(BLOCK_SIZES.values()), list(BLOCK_SIZES), minor=False)
        axis.legend()
    middle.set_ylabel("microseconds")
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    save_plot(figure, "kv")


def main() -> None:
    given = parse_arguments(__doc__ or "")
    report_figures(run(given), given)


if __name__ == "__main__":
    main()
