"""`benchmarks.chaos --one-kill`: one stream, through the kill of the decode worker that writes it, and its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import Arguments, save_plot
from benchmarks.recovery import make_single_plan, measure_recovery
from penstock.names import parse_event_id
from sim.chaos.history import read_history


@dataclass(frozen=True)
class KilledStream:
    """A stream as its reader saw it. Times are seconds since the request was sent."""

    times_s: list[float]
    """Of each token."""
    killed_at_s: float

    @property
    def num_before(self) -> int:
        """Tokens that the reader had before the stream stood still: the last may come just after the kill."""
        gaps = [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]
        return gaps.index(max(gaps)) + 1

    @property
    def goes_on_at_s(self) -> float:
        """When the reader got the first token of the worker that took over."""
        return self.times_s[self.num_before]


def kill_one(directory: Path, given: Arguments) -> dict[str, float]:
    """Kill the worker of one stream; draw what its reader saw, and return the figures.

    Raises `SystemExit` where the checker found anything: another token or text than an unbroken run gives, say.
    """
    plan = make_single_plan(given.choose_size(600, 600, 120))
    with measure_recovery("embedded", directory / "one-kill", plan) as found:
        pass  # what was found is complete once this is left
    if found.findings:
        raise SystemExit("\n".join(f"{one.kind}: {one.id}: {one.description}" for one in found.findings))
    stream = read_stream(list(read_history(directory / "one-kill" / "history.jsonl")))
    if given.is_full:
        draw_stream(stream)
    return {
        "one_kill_tokens": len(stream.times_s),
        "one_kill_tokens_before": stream.num_before,
        "one_kill_gap_s": stream.goes_on_at_s - stream.killed_at_s,
        "one_kill_findings": len(found.findings),
    }


def read_stream(history: Sequence[dict[str, Any]]) -> KilledStream:
    """Return the only stream of a history with one kill. Its positions are those of its event ids, in their order."""
    begun_s = next(entry["at"] for entry in history if entry["what"] == "submitted")
    killed_s = next(entry["at_s"] for entry in history if entry["what"] == "killed")
    seen = [(parse_event_id(entry["event"])[0], entry["at"] - begun_s) for entry in history if entry["what"] == "token"]
    assert [position for position, _ in seen] == list(range(len(seen)))
    return KilledStream([at_s for _, at_s in seen], killed_s - begun_s)


def draw_stream(stream: KilledStream) -> None:
    """Draw the tokens that the reader had over time, with the kill and the take-over."""
    count, before, again_s = len(stream.times_s), stream.num_before, stream.goes_on_at_s
    figure = Figure(figsize=(8, 3.4))
    axis = figure.subplots()
    axis.plot(stream.times_s, range(1, count + 1), linewidth=2)
    axis.axvspan(stream.killed_at_s, again_s, color="tab:red", alpha=0.1, linewidth=0)
    axis.axvline(stream.killed_at_s, color="tab:red", linestyle="--", linewidth=1)
    notes = [
        (f"SIGKILL of the decode worker\nafter token {before}", (stream.killed_at_s, before), (14, 60), "left"),
        (f"another worker goes on with token {before + 1},\n{again_s - stream.killed_at_s:.1f} s after the kill",
         (again_s, before), (-14, -40), "right"),
        (f"{count} tokens, and the text:\nthose of an unbroken run", (stream.times_s[-1], count), (-60, -10), "right"),
    ]  # fmt: skip
    for text, at, offset, side in notes:
        arrow = {"arrowstyle": "->", "color": "gray"}
        axis.annotate(text, at, offset, textcoords="offset points", ha=side, va="center", arrowprops=arrow, fontsize=9)
    axis.set(xlabel="seconds since the request was sent", ylabel="tokens that the reader has", xlim=0, ylim=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    save_plot(figure, "kill", "svg")
