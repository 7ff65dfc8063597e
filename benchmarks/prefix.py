"""What the KV store saves: time to first token with a shared prefix, and how many tokens of many requests it finds.

python -m benchmarks.prefix [--quick | --smoke] [--json FILE]

**Time to first token.** The 0.6B shape in bf16 with random weights, two threads, one prefill worker with shared memory,
disk and a real Valkey. Each request is a prefix of 2,000 tokens and a short end of its own, and takes the whole way: it
is submitted, taken from the bus, fetched, computed; its first token is in the log when the clock stops. In each round a
new prefix is asked for once cold, then with its blocks in the pool, and then in one tier only: those above have lost
them. The order of the tiers turns from round to round. Speedups are formed within a round. Whether to fetch or to
compute is the store's own decision, by the speeds it has measured; the table says what it was.

**Hit rate.** Two prefill and two decode workers as processes on the demo model; tenants that share a set of prefixes,
drawn by zipf, each request with an end of its own. Tokens that were found, against what an infinite cache with the same
block size would have found: every full block of a prompt but the one with its last token that any request of the tenant
had which prefill took earlier, also one that was still being computed (`hit_rate_gap_points`), or only one whose first
token was out by then (`hit_rate_gap_points_known`). No request may find anything before its tenant had asked for it.
"""

import statistics

from matplotlib.figure import Figure

from benchmarks.common import Arguments, run_benchmark, save_plot
from benchmarks.comparison import Rounds, compute_ratios, print_table
from benchmarks.prefix_first import TIERS, measure_first
from benchmarks.prefix_hits import Hits, measure_hits
from penstock.local.stack import Stack
from sim.forked import ForkedStack

COLD_SIDE = "cold"


def compute_speedups(seconds: Rounds) -> dict[str, float]:
    """Return cold to hit, within a round; the median of the rounds, and the smallest."""
    figures: dict[str, float] = {}
    for tier in TIERS:
        ratios = compute_ratios(seconds, COLD_SIDE, tier)
        figures |= {f"ttft_speedup_{tier}": statistics.median(ratios), f"ttft_speedup_{tier}_min": min(ratios)}
    return figures


def draw_plot(seconds: Rounds, hits: Hits) -> None:
    """Draw first tokens by where the prefix was, and the hit rate in the order of requests."""
    figure = Figure(figsize=(10, 3.8))
    left, right = figure.subplots(1, 2)
    left.boxplot([[one * 1000 for one in found] for found in seconds.values()], tick_labels=list(seconds))
    left.set(yscale="log", ylabel="ms", title="first token, shared prefix of 2,000 tokens")
    for name, values in hits.compute_over_time().items():
        right.plot(values, label=name)
    right.set(title="share of prompt tokens found", xlabel="requests", ylim=(0, 1))
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    save_plot(figure, "prefix")


def run(given: Arguments) -> dict[str, float]:
    """Measure, print and draw; return the figures."""
    firsts = measure_first(*given.choose_size((8, "q06", 1024), (1, "q06", 1024), (1, "smoke", 64)))
    seconds = {side: [one.seconds for one in found] for side, found in firsts.items()}
    print_table(seconds, "ms to the first token; 0.6B shape, bf16", 1000)
    for side, found in firsts.items():
        print(f"{side:6} {found[-1].cached_tokens} of {found[-1].prompt_tokens} tokens found; {found[-1].decision}")
    hits = measure_hits(*given.choose_size((Stack, 2000), (Stack, 200), (ForkedStack, 10)))
    print(
        f"found {hits.hit_rate:.4f}; an infinite cache finds {hits.infinite_hit_rate:.4f}, "
        f"in what was computed {hits.known_hit_rate:.4f}"
    )
    if given.is_full:
        draw_plot(seconds, hits)
    return compute_speedups(seconds) | {
        "hit_rate": hits.hit_rate,
        "hit_rate_infinite": hits.infinite_hit_rate,
        "hit_rate_gap_points": 100 * (hits.infinite_hit_rate - hits.hit_rate),
        "hit_rate_gap_points_known": 100 * (hits.known_hit_rate - hits.hit_rate),
        "cross_tenant_hits": hits.num_foreign_hits,
    }


if __name__ == "__main__":
    run_benchmark(__doc__, run)
