"""What takes hours, in turns: `make campaign MINUTES=60`.

python -m benchmarks.campaign [--minutes M] [--only PART …] [--quick | --smoke] [--json FILE]

Half of the minutes go to the simulated world, to scenes with real kills and to scenes unlike a quiet machine
(`sim/scenes.py`). The other parts share the rest: the one whose last result is oldest is next. Work is cut into pieces
of a minute or two. What cannot be cut takes a turn whole, in a run that is long enough.

After each piece `docs/figures/campaign.json` and `docs/campaign.md` are written and committed. So a run can be stopped
at any time, and the next one goes on with other seeds. A result counts for the sources of the product that it was taken
with, which a hash tells apart (`hash_sources`). Results of older sources stay as sums, their findings by name.
"""

import contextlib
import datetime
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.common import Arguments, describe_machine, run_benchmark
from sim.scenes import SCENES
from sim.world.flaws import FLAWS
from sim.world.regions.scene import REGIONS_LEVEL
from sim.world.servers import LEVELS
from tools.mutants import ROOMS, read_list
from tools.rooms import HOUSE

ROOT = Path(__file__).parents[1]
FIGURES, PAGE, LOGS = Path("docs/figures/campaign.json"), Path("docs/campaign.md"), Path(".cache/campaign")
MUTANT_LISTS = Path("docs/figures/mutants")
SUFFIXES = {".py", ".lua", ".cpp", ".h", ".js", ".html", ".css", ".json"}
FIRST_SEED = 20_000_000
"""Seeds begin here: smaller ones were played before there were campaigns."""
WORLD_S, FLAW_SEEDS, RESIZE_S = 60, 400, 0.5
REQUESTS_OF_A_SEED = 20
"""Of the world."""
RESIZED = "starts and stops"
REGION_REQUESTS = 30
"""As how many requests of other levels one of two regions counts, in the share of the time that a level gets."""
"""The world at a drawn level, whose workers are started and stopped all the time, down to none."""
MAIN_PARTS = ("world", "kills", "unlike")
PYTHON = sys.executable


@dataclass
class Row:
    """What was found in one thing that a part plays, with one hash of sources."""

    part: str
    what: str
    """The level, scene, flaw, room, instruction set or command."""
    sources: str
    commit: str = ""
    machine: str = ""
    at: str = ""
    """The day and minute of the last piece, in UTC."""
    played: int = 0
    seconds: float = 0.0
    """Its share of the time of all pieces."""
    counts: dict[str, int] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    """The first and the last seed, or the seed that found a flaw."""
    known: str = ""
    """The known fault by which it failed, as it has to."""
    told: list[str] = field(default_factory=list)
    """What is worth a line on the page and is no finding: mutants that nothing noticed, what a known fault did."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """Each has `seed`, `what`, `replay`, and a `mend` once somebody has written it there."""
    left_out: str = ""
    """What the machine lacks for it."""


@dataclass(frozen=True)
class Told:
    """What one command of a piece told."""

    counts: dict[str, int] = field(default_factory=dict)
    findings: Sequence[str] = ()
    seeds: Sequence[int] = ()
    told: Sequence[str] = ()
    known: str = ""
    left_out: str = ""


@dataclass(frozen=True)
class Task:
    """A command of a piece, and how its output is read. `what` names the row that gets the result."""

    what: str
    command: Sequence[str]
    read: Callable[[str, int], Told]
    """Gets the output and the exit status."""
    seed: int = 0
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A kind of work. `make_tasks` returns what the next piece runs side by side; nothing if there is nothing left."""

    name: str
    says: str
    make_tasks: Callable[["Figures"], list[Task]]
    expected_s: float
    """How long a piece takes where none was played yet."""


class Figures:
    """The rows of all campaigns so far, of these sources and older ones."""

    def __init__(self, path: Path, sources: str) -> None:
        kept = json.loads(path.read_text()) if path.exists() else {"rows": [], "earlier": {}}
        self._path, self.sources = path, sources
        self.rows = [Row(**row) for row in kept["rows"]]
        self.earlier: dict[str, dict[str, int]] = kept["earlier"]
        """Sums of the rows of older sources, by part."""
        self._fold_older()

    def _fold_older(self) -> None:
        """Add rows of older sources to the sums. Those with findings stay."""
        for row in [row for row in self.rows if row.sources != self.sources and not row.findings]:
            sums = self.earlier.setdefault(row.part, {})
            for name, count in {"pieces": row.played, "last_seed": 0, **row.counts}.items():
                sums[name] = sums.get(name, 0) + count
            sums["last_seed"] = max(sums["last_seed"], *row.seeds, 0)
            self.rows.remove(row)

    def of(self, part: str, what: str = "") -> list[Row]:
        """Return the rows of a part with these sources, or of one thing in it."""
        return [r for r in self.rows if (r.part, r.sources) == (part, self.sources) and what in ("", r.what)]

    def count(self, part: str, name: str, what: str = "") -> int:
        """Return the sum of a count of a part, or of one thing in it; `played` counts pieces."""
        rows = self.of(part, what)
        return sum(row.played if name == "played" else row.counts.get(name, 0) for row in rows)

    def find_next_seed(self, part: str, what: str = "") -> int:
        """Return a seed that no piece of the part, or of one thing in it, had with whatever sources."""
        last = [seed for row in self.rows if row.part == part and what in ("", row.what) for seed in row.seeds]
        return max(FIRST_SEED, self.earlier.get(part, {}).get("last_seed", 0) + 1, *(seed + 1 for seed in last))

    def find_last_time(self, part: str) -> str:
        """Return when a part was played last with these sources; empty if never."""
        return max((row.at for row in self.of(part)), default="")

    def expect_seconds(self, part: Part) -> float:
        """Return how long a piece of a part takes, by those before."""
        rows = [row for row in self.rows if row.part == part.name and row.played and not row.left_out]
        return sum(row.seconds for row in rows) / sum(row.played for row in rows) if rows else part.expected_s

    def add(self, part: str, task: Task, told: Told, seconds: float, commit: str, machine: str) -> None:
        """Add what a task told to its row."""
        row = next(iter(self.of(part, task.what)), None)
        if row is None:
            row = Row(part, task.what, self.sources)
            self.rows.append(row)
        row.commit, row.machine, row.at = commit, machine, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}"
        row.known, row.left_out = told.known, told.left_out
        row.played, row.seconds = row.played + 1, round(row.seconds + seconds, 1)
        for name, count in told.counts.items():
            row.counts[name] = row.counts.get(name, 0) + count
        if seeds := [*row.seeds, *told.seeds]:
            row.seeds = [min(seeds), max(seeds)]
        row.told = [*row.told, *(line for line in told.told if line not in row.told)][-40:]
        replay = shlex.join(word.replace(PYTHON, "python") for word in task.command)
        row.findings += [{"seed": task.seed, "what": what[:300], "replay": replay} for what in told.findings]

    def list_open_findings(self) -> list[tuple[Row, dict[str, Any]]]:
        """Return findings without a mend."""
        return [(row, finding) for row in self.rows for finding in row.findings if not finding.get("mend")]

    def write(self) -> None:
        """Write the file, one row a line."""
        rows = sorted(self.rows, key=lambda row: (row.part, row.what, row.sources))
        lines = ",\n".join(json.dumps({k: v for k, v in asdict(row).items() if v}) for row in rows)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(f'{{"earlier": {json.dumps(self.earlier)},\n"rows": [\n{lines}\n]}}\n')


# The parts.


def _read_world(seed: int, output: str, status: int) -> Told:
    if (totals := re.search(r"^(\d+) requests, (\d+) kills, \d+ findings", output, re.MULTILINE)) is None:
        return Told(findings=[f"the world ended with status {status}: {_last_line(output)}"])
    seeds = [int(seed) for seed in re.findall(r"^seed (\d+):", output, re.MULTILINE)]
    found = re.findall(r"^    (\w+: .*)$", output, re.MULTILINE)
    counts = {"requests": int(totals[1]), "kills": int(totals[2])}
    if resized := re.search(r"(\d+) starts and stops$", output, re.MULTILINE):
        counts |= {RESIZED: int(resized[1])} if int(resized[1]) else {}
    last = [seed + counts["requests"] // REQUESTS_OF_A_SEED]
    return Told(counts, [f"seeds {', '.join(map(str, seeds))}: {line}" for line in found], last)


def _make_world(figures: Figures, max_s: float = WORLD_S) -> list[Task]:
    """Play the levels with the fewest requests, one on each core. One of regions counts as many."""
    weights = dict.fromkeys([*LEVELS, RESIZED], 1) | {REGIONS_LEVEL: REGION_REQUESTS}
    levels = sorted(weights, key=lambda level: weights[level] * figures.count("world", "requests", level))

    def make(level: str) -> Task:
        seed = figures.find_next_seed("world", level)
        words = ["--seed", str(seed), "--seeds", "1000000", "--max-s", str(max_s)]
        words += ["--rate", f"resize_s={RESIZE_S}"] if level == RESIZED else ["--level", level]
        read = partial(_read_world, seed)
        return Task(level, [PYTHON, "-m", "sim.world", *words], read, seed, {"PYTHONHASHSEED": "0"})

    return [make(level) for level in levels[: os.cpu_count() or 1]]


def _read_scene(output: str, status: int) -> Told:
    lines = [line for line in output.splitlines() if line.startswith('{"scene"')]
    if not lines:
        return Told(findings=[f"the scene ended with status {status}: {_last_line(output)}"])
    told = json.loads(lines[-1])
    if "left_out" in told:
        return Told(left_out=told["left_out"])
    known = next(scene.known for scene in SCENES if scene.name == told["scene"])
    counts = {"requests": told["requests"], "kills": told["kills"]}
    counts |= {RESIZED: told["starts_and_stops"]} if told["starts_and_stops"] else {}
    found = told["findings"]
    found = [*found[:4], f"and {len(found) - 4} more"] if len(found) > 5 else found
    return Told(counts, found, [told["seed"]], told["known"], known if told["known"] else "")


def _make_scene(group: str) -> Callable[[Figures], list[Task]]:
    def make(figures: Figures) -> list[Task]:
        """Play the scene that was played least."""
        scene = min(
            (scene for scene in SCENES if scene.group == group),
            key=lambda scene: figures.count(group, "played", scene.name),
        )
        seed = figures.find_next_seed(group)
        return [Task(scene.name, [PYTHON, "-m", "sim.scenes", scene.name, "--seed", str(seed)], _read_scene, seed)]

    return make


def _read_flaw(output: str, status: int) -> Told:
    found = re.search(r": (\d+) (.*) \d+ s$", output.strip().splitlines()[0] if output.strip() else "")
    if status or not found:
        says = _last_line(output) if status else f"the world does not find this flaw in {FLAW_SEEDS} seeds"
        return Told({"flaws": 1}, [says])
    return Told({"flaws": 1, "found": 1}, seeds=[int(found[1])], told=[found[2]])


def _make_flaws(figures: Figures) -> list[Task]:
    left = [flaw for flaw in FLAWS if not figures.of("flaws", flaw.name)][: os.cpu_count() or 1]
    words = [PYTHON, "-m", "sim.world.flaws", "--seeds", str(FLAW_SEEDS)]
    return [Task(flaw.name, [*words, flaw.name], _read_flaw) for flaw in left]


def _read_mutants(output: str, status: int) -> Told:
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if status or not rows:
        return Told(findings=[f"mutants ended with status {status}: {_last_line(output)}"])
    survived = [row for row in rows if row["noticed"] == "nothing"]
    told = [f"{row['file']}: `{row['text'].strip()}` → `{row['becomes'].strip()}`" for row in survived]
    return Told({"mutants": len(rows), "noticed": len(rows) - len(survived)}, told=told)


def _make_mutants(figures: Figures) -> list[Task]:
    """Play one new mutant each in the rooms with the fewest."""
    rooms = sorted(ROOMS, key=lambda room: figures.count("mutants", "mutants", room))[: os.cpu_count() or 1]
    seed = figures.find_next_seed("mutants")

    def make(room: str) -> Task:
        read = lambda output, status: replace(_read_mutants(output, status), seeds=[seed])  # noqa: E731
        return Task(room, [PYTHON, "-m", "tools.mutants", "try", room, "--seed", str(seed), "--count", "1"], read, seed)

    return [make(room) for room in rooms]


def _make_weighed(_: Figures) -> list[Task]:
    """Play listed mutants against each test file of their room, where that was not done yet."""
    rooms = [room for room in ROOMS if any(not one.weighed for one in read_list(room))][: os.cpu_count() or 1]
    words = [PYTHON, "-m", "tools.mutants", "weigh"]
    return [Task(room, [*words, room, "--count", "1"], _read_weighed) for room in rooms]


def _read_weighed(output: str, status: int) -> Told:
    return Told({"mutants": 1}, [f"ended with status {status}: {_last_line(output)}"] if status else [])


def _read_status(output: str, status: int) -> Told:
    # Processes that end later may write behind the summary.
    summary = (re.findall(r"^.*\b\d+ (?:passed|failed|skipped).*$", output, re.MULTILINE) or [""])[-1]
    counts = {name: int(count) for count, name in re.findall(r"\b(\d+) (passed|failed|skipped)", summary)}
    failed = re.findall(r"^(?:FAILED|ERROR) .*$", output, re.MULTILINE)
    newest = tuple(re.findall(r"^newest: (.*)$", output, re.MULTILINE))
    return Told(counts, failed or [_last_line(output)] if status else [], told=newest)


def _read_templates(seed: int, output: str, status: int) -> Told:
    found = re.search(r"^(\d+) chats of templates", output, re.MULTILINE)
    if found is None:
        return Told(findings=[f"the templates ended with status {status}: {_last_line(output)}"])
    faults = re.findall(r"^fault: (.*)$", output, re.MULTILINE)
    told = [*faults[:4], f"and {len(faults) - 4} more"] if len(faults) > 5 else faults
    return Told({"chats": int(found[1])}, told, [seed])


def _make_templates(figures: Figures) -> list[Task]:
    """Return one draw of chats, once with these sources."""
    if figures.of("templates"):
        return []
    seed = figures.find_next_seed("templates")
    words = ["--quick", "--seed", str(seed)]
    return [Task("templates", [PYTHON, "-m", "benchmarks.templates", *words], partial(_read_templates, seed), seed)]


def _make_sanitize(figures: Figures) -> list[Task]:
    from tools.sanitize import list_supported_sets

    left = [name for name in list_supported_sets() if not figures.of("sanitize", name)][:1]
    return [Task(name, [PYTHON, "-m", "tools.sanitize", "--only", name], _read_status) for name in left]


def _make_whole(part: str, *command: str, **environment: str) -> Callable[[Figures], list[Task]]:
    """Return what plays a command whole, once with these sources."""
    told = {"COLUMNS": "300"} | environment  # else pytest's summary has no reasons
    return lambda figures: [] if figures.of(part) else [Task(part, command, _read_status, 0, told)]


PARTS = (
    Part("world", "The real workers, roles, gateways and batches in virtual time, under mishaps", _make_world, WORLD_S),
    Part("kills", "Real processes that are killed at their steps, among faults of servers", _make_scene("kills"), 200),
    Part("unlike", "Worlds unlike a quiet machine with quick servers", _make_scene("unlike"), 80),
    Part("flaws", "Flaws planted in the product, which the world must find", _make_flaws, 60),
    Part("mutants", "Small changes drawn by a new seed, which the world or the tests must notice", _make_mutants, 90),
    Part("weighed", "The listed mutants, against each test file of their room", _make_weighed, 120),
    Part("templates", "Published chat templates, with texts that look like control tokens", _make_templates, 400),
    Part("sanitize", "The kernels' tests under AddressSanitizer and UBSan", _make_sanitize, 400),
    Part("slow", "`make test` on half a core", _make_whole("slow", "tools/slow.sh", "make", "test"), 1200),
    Part(
        "products", "Tests whose cases are drawn by a seed, with all of their cases",
        _make_whole("products", "make", "test-all", TEST_WHOLE_PRODUCTS="1"), 1500,
    ),
    Part("clients", "SDKs and frameworks of others", _make_whole("clients", "make", "test-clients"), 600),
    Part(
        "newest", "The same at their newest releases, coding agents three times each",
        _make_whole("newest", "make", "test-clients", NEWEST="1", TEST_AGENT_RUNS="3"), 1500,
    ),
    Part("vllm", "The engine's contract on vLLM", _make_whole("vllm", "make", "test-vllm"), 1200),
)  # fmt: skip


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1][:300]


# A run.


def hash_sources() -> str:
    """Return a hash of the product's files. What plays it may change: a scene that is added takes no result away."""
    hashed = hashlib.sha256()
    for name in HOUSE:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.suffix in SUFFIXES and path.is_file() and "__pycache__" not in path.parts:
                hashed.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return hashed.hexdigest()[:12]


class Runner:
    """Runs the commands of a piece."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def end_on_signals(self) -> None:
        """End the commands, and this process, at SIGINT and SIGTERM."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)

    def _end(self, number: int, _: object) -> NoReturn:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._running:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                process.wait(20.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        print("stopped; the next run goes on")
        sys.exit(128 + number)

    def run_tasks(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Told, float]]:
        """Run commands side by side. Yield what each told, and its share of the time until its end."""
        begun_s, logs = time.monotonic(), [ROOT / LOGS / f"{index}.log" for index in range(len(tasks))]
        for task, log in zip(tasks, logs, strict=True):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("w") as out:
                process = subprocess.Popen(
                    task.command, cwd=ROOT, env={**os.environ, **task.environment}, stdin=subprocess.DEVNULL,
                    stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                )  # fmt: skip
            self._running.append(process)
        for task, log, process in zip(tasks, logs, list(self._running), strict=True):
            status = process.wait()
            self._running.remove(process)
            spent_s = (time.monotonic() - begun_s) / len(tasks)
            yield task, task.read(log.read_text(errors="replace"), status), spent_s


def choose_part(
    figures: Figures, spent_s: dict[str, float], left_s: float, parts: Sequence[Part]
) -> tuple[Part, list[Task]] | None:
    """Return the part whose turn it is, and its tasks; None if nothing that is left fits into the time that is left.

    The main parts have half of the time, also in a run in which another part would take longer than the other half. The
    main part with the least time is next, and then the other part with the oldest last result.
    """
    main = [part for part in parts if part.name in MAIN_PARTS]
    rest = [part for part in parts if part.name not in MAIN_PARTS]
    main.sort(key=lambda part: spent_s.get(part.name, 0.0))
    rest.sort(key=lambda part: (figures.find_last_time(part.name), -part.expected_s))
    main_s, rest_s = (sum(spent_s.get(part.name, 0.0) for part in some) for some in (main, rest))
    rest_left_s = (main_s + rest_s + left_s) / 2 - rest_s if main else left_s
    for part in [*main, *rest] if main_s <= rest_s else [*rest, *main]:
        fits = figures.expect_seconds(part) <= (left_s if part in main else min(left_s, rest_left_s))
        if fits and (tasks := part.make_tasks(figures)):
            return part, tasks
    return None


def _run_git(*words: str) -> str:
    told = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() if told.returncode == 0 else ""


def commit_results() -> None:
    """Commit what a piece has written, and nothing else. Where there is no git, or nobody who commits, do nothing."""
    paths = [str(path) for path in (FIGURES, PAGE, MUTANT_LISTS)]
    _run_git("add", "--", *paths)
    _run_git("commit", "--quiet", "-m", "Results of the campaign", "--", *paths)


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks; how long a full run goes on, which parts it has, and whether it commits."""

    minutes: float = 60.0
    only: Sequence[str] = ()
    no_commit: bool = False


def run(given: Options) -> dict[str, float]:
    """Run pieces until the minutes are over. Return how many requests, kills and findings there were."""
    if given.size == "smoke":
        with tempfile.TemporaryDirectory() as folder:
            smoke = replace(given, size="full", minutes=10.0, no_commit=True)
            world = replace(PARTS[0], make_tasks=partial(_make_world, max_s=1.0))
            return run_pieces(smoke, Path(folder) / "campaign.json", [world], 1)
    return run_pieces(given if given.is_full else replace(given, minutes=2.0), ROOT / FIGURES)


def run_pieces(
    given: Options, path: Path, parts: Sequence[Part] = PARTS, max_pieces: int | None = None
) -> dict[str, float]:
    """Run pieces until the minutes are over, or there were so many, and keep the figures in a file."""
    runner, spent_s, figures = Runner(), dict[str, float](), Figures(path, hash_sources())
    runner.end_on_signals()
    parts = [part for part in parts if not given.only or part.name in given.only]
    begun_s, machine, before = time.monotonic(), describe_machine(), len(figures.list_open_findings())
    totals = {"requests": 0.0, "kills": 0.0}
    for _ in itertools.count() if max_pieces is None else range(max_pieces):
        spent = time.monotonic() - begun_s
        if (chosen := choose_part(figures, spent_s, 60.0 * given.minutes - spent, parts)) is None:
            break
        part, tasks = chosen
        print(
            f"{spent / 60:5.1f} of {given.minutes:g} min  {part.name}: {', '.join(t.what for t in tasks)}", flush=True
        )
        piece_s, commit = time.monotonic(), _run_git("rev-parse", "--short", "HEAD")
        for task, told, seconds in runner.run_tasks(tasks):
            figures.add(part.name, task, told, seconds, commit, machine)
            totals = {name: count + told.counts.get(name, 0) for name, count in totals.items()}
            print(
                f"{'':17}{task.what}: {_describe_told(told)} ({seconds:.0f} s)",
                *told.findings,
                sep="\n    ",
                flush=True,
            )
        spent_s[part.name] = spent_s.get(part.name, 0.0) + time.monotonic() - piece_s
        figures.write()
        (ROOT / PAGE if path == ROOT / FIGURES else path.with_suffix(".md")).write_text(
            write_page(figures, given.minutes)
        )
        if not given.no_commit:
            commit_results()
    return totals | {"findings": len(figures.list_open_findings()) - before}


def _describe_told(told: Told) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in told.counts.items())
    known = f"; known: {told.known}" if told.known else ""
    return told.left_out or f"{counts}; {len(told.findings)} findings{known}"


# The page.


def _format_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _describe_row(row: Row) -> str:
    """Return in a few words how a thing came out."""
    if row.left_out:
        return f"not played: {row.left_out}"
    open_ones = [one for one in row.findings if not one.get("mend")]
    return f"**{len(open_ones)} findings**" if open_ones else f"known: {row.known}" if row.known else "holds"


def list_left_out(figures: Figures) -> Iterator[str]:
    """Yield what has no result with these sources."""
    for group in ("kills", "unlike"):
        missing = [one.name for one in SCENES if one.group == group and not figures.of(group, one.name)]
        if missing:
            yield f"{group}: {'; '.join(missing)}"
    if missing := [flaw.name for flaw in FLAWS if not figures.of("flaws", flaw.name)]:
        yield f"flaws: {len(missing)} of {len(FLAWS)} are not played yet"
    if num_left := sum(not one.weighed for room in ROOMS for one in read_list(room)):
        yield f"weighed: {num_left} listed mutants are not played yet"
    for part in PARTS:
        if part.name not in (*MAIN_PARTS, "flaws", "weighed") and not figures.of(part.name):
            yield f"{part.name}: takes {figures.expect_seconds(part) / 60:.0f} minutes in one piece"
    yield from (f"{row.part}, {row.what}: {row.left_out}" for row in figures.rows if row.left_out)


def write_page(figures: Figures, minutes: float) -> str:
    """Return the page."""
    own = [row for row in figures.rows if row.sources == figures.sources]
    machines = sorted({row.machine for row in own})
    commits = [row.commit for row in sorted(own, key=lambda row: row.at) if row.commit][:: max(1, len(own) - 1)]
    totals = []
    for part in PARTS:
        names = dict.fromkeys(name for row in figures.of(part.name) for name in row.counts)
        counts = ", ".join(f"{figures.count(part.name, name):,} {name}" for name in names)
        opened = sum(
            row.part == part.name and row.sources == figures.sources for row, _ in figures.list_open_findings()
        )
        spent_min = sum(row.seconds for row in figures.of(part.name)) / 60
        earlier = {k: v for k, v in figures.earlier.get(part.name, {}).items() if k not in ("pieces", "last_seed")}
        totals.append((
            part.name, part.says, counts or "–", f"{spent_min:.0f}", opened if counts else "–",
            ", ".join(f"{count:,} {name}" for name, count in earlier.items()) or "–",
        ))  # fmt: skip
    scenes = [
        (s.name, s.must, _describe_row(row), row.counts.get("requests", 0), row.counts.get("kills", 0), row.played)
        for s in SCENES for row in figures.of(s.group, s.name)
    ]  # fmt: skip
    flaws = [(row.what, row.seeds[0] if row.seeds else "**not found**", *row.told[:1]) for row in figures.of("flaws")]
    rooms = [
        (row.what, row.counts.get("mutants", 0), row.counts.get("noticed", 0), row.told[-1] if row.told else "–")
        for row in figures.of("mutants")
    ]
    world = [
        (row.what, f"{row.counts.get('requests', 0):,}", f"{row.counts.get('kills', 0):,}", row.seeds[-1])
        for row in figures.of("world") if row.seeds
    ]  # fmt: skip
    findings = [
        (row.part, row.what, one["seed"], one["what"], f"`{one['replay']}`", one.get("mend") or "**open**")
        for row in figures.rows for one in row.findings
    ]  # fmt: skip
    known: dict[str, list[str]] = {}
    for scene in SCENES:
        known.setdefault(scene.known, []).append(scene.name)
    known.pop("", None)
    left_out = list(list_left_out(figures))
    return f"""# The campaign

`make campaign MINUTES=60` writes this page and [its figures](figures/campaign.json): do not edit it. It plays what
takes hours in turns, with new seeds each time: the simulated world, kills of real processes, worlds unlike a quiet
machine with quick servers, planted flaws, mutants, the kernels under a sanitizer, and the tests in other surroundings.
All figures are of one state of the product, hash `{figures.sources}`, commits {" to ".join(commits) or "none yet"}.
Machine: {"; ".join(machines) or "none yet"}. The last run was given {minutes:g} minutes.

{_format_table(("part", "what it does", "counts", "minutes", "open findings", "with older sources"), totals)}
## Left out

These have no result with these sources.

{chr(10).join(f"- {line}" for line in left_out) or "Nothing."}

## Findings

{_format_table(("part", "where", "seed", "what", "again by", "mended by"), findings) if findings else "None."}

## Scenes

A scene marked `known` fails by a fault that is known and not mended yet. It must fail: a scene that passes in spite of
its mark is a finding.

{chr(10).join(f"- {fault}: {', '.join(names)}" for fault, names in sorted(known.items())) or "None is marked."}

{_format_table(("scene", "what must hold", "result", "requests", "kills", "times"), scenes)}
## The world, by level

{_format_table(("level", "requests", "kills", "last seed"), world)}
## Planted flaws

{_format_table(("flaw", "found at seed", "as"), flaws)}
## Mutants, by room

{_format_table(("room", "played", "noticed", "the last that nothing noticed"), rooms)}"""


if __name__ == "__main__":
    found = run_benchmark(
        __doc__, run, Options,
        minutes={"type": float, "default": 60.0, "help": "how long a full run goes on"},
        only={"action": "append", "default": [], "choices": [part.name for part in PARTS], "help": "these parts alone"},
        no_commit={"action": "store_true", "help": "write the results, but do not commit them"},
    )  # fmt: skip
    sys.exit(found["findings"] > 0)
