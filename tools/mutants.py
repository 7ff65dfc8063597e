"""`python -m tools.mutants draw|forget|run|try|weigh ROOM …`: small changes, which the world or the tests must notice.

`draw` writes a list of mutants that follows from a seed into `docs/figures/mutants/ROOM.json`. A mutant names a file,
the lines that it changes, which place with this text it means, and the lines in their place: so a list can be played
again on a later tree, and a mutant whose lines are gone says so. `run` makes each change in a copy of the repository,
and writes into the list what noticed it: the first seconds of the world, the tests, or the rest of the world's minute.
Seconds are processor time, as other work shares the machine. What was played before is left out, until `forget` takes
the results off a list. `weigh` runs each test file of the room by itself, without the world, and writes into the list
which of them notice the mutant. `try` plays newly drawn mutants and prints them, a JSON object a line.
"""

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tools.rooms import HOUSE

NOTHING, GONE = "nothing", "its lines are gone"
ROOT = Path(__file__).parents[1]
LISTS = ROOT / "docs/figures/mutants"
COPIED = (*HOUSE, "sim", "tests", "docs", "tools", "pyproject.toml")
PRELOADED = (
    "fakeredis",
    "confluent_kafka.admin",
    "fastapi.responses",
    "transformers",
    "torch",
    "redis.asyncio",
    "lupa",
)
"""Libraries that each process needs: the one that forks them imports them once."""
BEGINNING_S = 6.0
"""How long the world plays before the tests."""
TESTS_S = 60.0
ENDLESS_S = 30.0
"""What takes so much longer never ends."""
TEST_WALL_S, WALL_S = 100.0, 1200.0
"""A test that waits for so long never ends, nor what takes so long in all."""


@dataclass(frozen=True)
class Room:
    """A part of the source."""

    path: str
    tests: tuple[str, ...]
    tests_of_modules: tuple[str, ...] = ()
    """Tests for those modules alone that they import."""
    levels: tuple[tuple[str, str], ...] = ()
    """The level of the world, by what a path begins with; "" is drawn by the seed. Without any it is not played."""
    without: str = ""
    """Tests that are left out, as an expression for pytest."""


WORKER, BUS = "worker/penstock/worker/", "core/penstock/bus/"
ROOMS = {
    "worker": Room(
        WORKER,
        (
            "tests/pipeline/test_exits.py", "tests/pipeline/test_confined_errors.py", "tests/pipeline/test_reading.py",
            "tests/pipeline/test_refused_writes.py", "tests/test_worker.py",
        ),
        (
            "tests/bus/test_settler.py", "tests/record/test_rescue.py", "tests/test_lag.py",
            "tests/pipeline/test_standing_loop.py",
        ),
        ((WORKER, ""),),
        "kafka or ends_itself",
    ),
    "record": Room(
        "core/penstock/record/", ("tests/record", "tests/protocol/test_replay.py"), ("tests/client/test_streams.py",),
        (("", "streams"),),
    ),
    "bus": Room(
        BUS,
        (
            "tests/bus/test_kafka_member.py", "tests/bus/test_offsets.py", "tests/bus/test_orphans.py",
            "tests/bus/test_admin_lookups.py", "tests/bus/test_partitions.py", "tests/bus/test_follow.py",
            "tests/test_placement.py", "tests/bus/test_contract.py",
        ),
        (),
        ((f"{BUS}streams", "streams"), (BUS, "kafka")),
        "(kafka and (contract or follow)) or redelivery_after_a_crash",
    ),
    "kvstore": Room(
        "kvstore/penstock/kvstore/store",
        (
            "tests/kvstore/test_store.py", "tests/kvstore/test_keys.py", "tests/kvstore/test_transfers.py",
            "tests/kvstore/test_tiers.py", "tests/pipeline/test_kv.py",
        ),
    ),
}  # fmt: skip
"""Left out are tests of contracts on Kafka, and those that start processes of workers, which take longer."""


@dataclass(frozen=True)
class Mutant:
    """A change of some lines."""

    file: str
    text: str
    """The lines as they are."""
    becomes: str
    nth: int = 0
    """How many places with this text are before it."""
    noticed: str = ""
    """What noticed it; empty if it was not played yet."""
    seconds: float = 0.0
    equivalent: str = ""
    """Why nothing can notice it, written by hand."""
    weighed: str = ""
    """The test files that notice it, or `NOTHING`; empty if they were not run one by one yet."""

    def apply(self, source: str) -> str | None:
        """Return the changed source, or None where the lines are gone."""
        places = [found.start() for found in re.finditer(f"^{re.escape(self.text)}$", source, re.MULTILINE)]
        if self.nth >= len(places):
            return None
        return source[: places[self.nth]] + self.becomes + source[places[self.nth] + len(self.text) :]


# Drawing.

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
}  # fmt: skip
UNTOUCHED_CALLS = re.compile(r"log\.\w+|failpoint|stage_failpoint|load_script|TypeVar|cast")
"""What is logged, where tests kill, and types."""
LUA_CHANGES = (
    ("==", "~="), ("~=", "=="), (" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" and ", " or "),
    (" or ", " and "), (" not ", " "), (" + 1", " - 1"), ("'1'", "'0'"), ("true", "false"), ("math.max", "math.min"),
)  # fmt: skip
Change = tuple[int, int, str]
"""From where to where of a source, and what stands there instead."""


class Changes(ast.NodeVisitor):
    """Finds the changes of a module. Imports, types, assertions and texts stay as they are."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]
        self.found: list[Change] = []
        self.visit(ast.parse(source))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, num_bytes: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:num_bytes].decode())

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        self.found.append((*self._span(node), text))

    def _swap(self, left: ast.expr, operator: ast.AST, right: ast.expr) -> None:
        """Replace an operator between two operands."""
        before, after = OPERATORS.get(type(operator), ("", ""))
        start, end = self._span(left)[1], self._span(right)[0]
        words = re.escape(before).replace(r"\ ", r"\s+")
        if before and (found := re.search(words, self._source[start:end])):
            self.found.append((start + found.start(), start + found.end(), after))

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            self._replace(test, f"not {self._source[slice(*self._span(test))]}")

    def visit(self, node: ast.AST) -> None:
        """Look at a node and at those in it, unless nothing is to be changed there."""
        called = node.value if isinstance(node, ast.Expr) else node
        if isinstance(called, ast.Call) and UNTOUCHED_CALLS.fullmatch(ast.unparse(called.func)):
            return
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return
        look: Callable[[Any], None] = getattr(self, f"_look_at_{type(node).__name__.lower()}", self.generic_visit)
        look(node)

    def _look_at_compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._swap(left, operator, right)
        self.generic_visit(node)

    def _look_at_boolop(self, node: ast.BoolOp) -> None:
        for left, right in itertools.pairwise(node.values):
            self._swap(left, node.op, right)
        self.generic_visit(node)

    def _look_at_binop(self, node: ast.BinOp) -> None:
        if not (isinstance(node.right, ast.Constant) and node.right.value is None):  # else a type
            self._swap(node.left, node.op, node.right)
        self.generic_visit(node)

    def _look_at_augassign(self, node: ast.AugAssign) -> None:
        self._swap(node.target, node.op, node.value)
        self._delete(node)

    def _look_at_unaryop(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, self._source[slice(*self._span(node.operand))])
        self.generic_visit(node)

    def _look_at_constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int) and node.value < 10:  # of larger ones few matter to one
            self._replace(node, str(node.value + 1))

    def _look_at_return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and not node.value.value):
            self._replace(node, "return None")
        self.generic_visit(node)

    def _look_at_break(self, node: ast.Break) -> None:
        self._replace(node, "continue")

    def _look_at_continue(self, node: ast.Continue) -> None:
        self._replace(node, "break")

    def _look_at_if(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self._negate(node.test)
            self.generic_visit(node)

    _look_at_while = _look_at_ifexp = _look_at_if

    def _look_at_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def _delete(self, node: ast.stmt) -> None:
        self._replace(node, "pass")
        self.generic_visit(node)

    _look_at_delete = _delete

    def _look_at_expr(self, node: ast.Expr) -> None:
        (self._delete if isinstance(node.value, ast.Call) else self.generic_visit)(node)

    def _look_at_assign(self, node: ast.Assign) -> None:
        is_kept = len(node.targets) > 1 or not isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        (self.generic_visit if is_kept else self._delete)(node)

    def _look_at_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def _look_at_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":
            self.generic_visit(node)

    def _look_at_classdef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def _look_at_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    _look_at_asyncfunctiondef = _look_at_functiondef


def find_lua_changes(source: str) -> Iterator[Change]:
    """Yield the changes of a script."""
    start = 0
    for line in source.splitlines(keepends=True):
        code = line.split("--")[0]
        for before, after in LUA_CHANGES:
            for found in re.finditer(re.escape(before), code):
                yield start + found.start(), start + found.end(), after
        if re.fullmatch(r"\s*(redis\.call\(.*\)|if .* then return .* end)\s*", code):
            yield start + len(code) - len(code.lstrip()), start + len(code.rstrip()), "local _ = 0"
        start += len(line)


def list_mutants(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    source = path.read_text()
    for start, end, text in Changes(source).found if path.suffix == ".py" else find_lua_changes(source):
        first, last = source.rfind("\n", 0, start) + 1, source.find("\n", end)
        before = source[first:last]
        nth = len(re.findall(f"^{re.escape(before)}$", source[:first], re.MULTILINE))
        made = Mutant(str(path.relative_to(ROOT)), before, source[first:start] + text + source[end:last], nth)
        changed = made.apply(source)
        assert changed == source[:start] + text + source[end:], made
        if path.suffix == ".py":
            ast.parse(changed)
        yield made


def draw_mutants(room: Room, seed: int, count: int) -> list[Mutant]:
    """Return mutants of a room that follow from a seed."""
    paths = sorted((ROOT / room.path).rglob("*") if room.path.endswith("/") else ROOT.glob(f"{room.path}*"))
    every = [one for path in paths if path.suffix in (".py", ".lua") for one in list_mutants(path)]
    return random.Random(seed).sample(every, min(count, len(every)))


# Playing.


class Copy:
    """A copy of the repository, in which processes run."""

    def __init__(self, folder: Path, world_s: float) -> None:
        self._folder, self._world_s = folder, world_s
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, folder / name)

    def play(self, mutant: Mutant, room: Room) -> Mutant:
        """Return a mutant with what noticed it."""
        with self._apply(mutant) as is_there:
            return self._play_applied(mutant, room) if is_there else replace(mutant, noticed=GONE, seconds=0.0)

    def weigh(self, mutant: Mutant, room: Room) -> Mutant:
        """Return a mutant with the test files that notice it, each of which runs by itself."""
        with self._apply(mutant) as is_there:
            if not is_there:
                return replace(mutant, weighed=GONE)
            limit_s = TESTS_S + ENDLESS_S
            found = [
                name
                for name in _list_files(mutant, room)
                if self._run(partial(run_tests, [name], room.without), limit_s)[0]
            ]
        return replace(mutant, weighed=" ".join(found) or NOTHING)

    @contextlib.contextmanager
    def _apply(self, mutant: Mutant) -> Iterator[bool]:
        """Change the copy meanwhile. The value says whether the mutant's lines are there."""
        original, path = ROOT / mutant.file, self._folder / mutant.file
        changed = mutant.apply(original.read_text()) if original.exists() else None
        if changed is not None:
            path.write_text(changed)
        try:
            yield changed is not None
        finally:
            if changed is not None:
                shutil.copy2(original, path)  # with its time, so that its bytecode is right again

    def _play_applied(self, mutant: Mutant, room: Room) -> Mutant:
        level = next((level for start, level in room.levels if mutant.file.startswith(start)), None)
        tests = _list_tests(mutant, room)
        stages: list[tuple[Callable[[], int], float]] = [(lambda: run_tests(tests, room.without), TESTS_S)]
        if level is not None:
            rest_s = self._world_s - BEGINNING_S
            stages.insert(0, (lambda: play_world(level, 1, BEGINNING_S), BEGINNING_S))
            stages.append((lambda: play_world(level, 1001, rest_s), rest_s))
        noticed, seconds = "", 0.0
        for call, limit_s in stages:
            noticed, spent_s = self._run(call, limit_s + ENDLESS_S)
            seconds += spent_s
            if noticed:
                break
        return replace(mutant, noticed=noticed or NOTHING, seconds=round(seconds, 1))

    def _run(self, call: Callable[[], int], limit_s: float) -> tuple[str, float]:
        """Call a function in a process of its own. Return what it noticed, and the processor time it took."""
        told, process = self._folder / "told", os.fork()
        if not process:
            try:
                self._become_child(told, limit_s)
                status = call()
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            os._exit(status)
        ended, until_s = 0, time.monotonic() + WALL_S
        while not ended:
            ended, waited, used = os.wait4(process, os.WNOHANG)
            if time.monotonic() > until_s:
                os.kill(process, signal.SIGKILL)
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what it has left
        status, spent_s = os.waitstatus_to_exitcode(waited), used.ru_utime + used.ru_stime
        if status < 0:
            return f"endless ({signal.Signals(-status).name})", spent_s
        lines = told.read_text(errors="replace").splitlines()
        if lines and lines[0].startswith("seed "):
            return "".join(lines[:2])[:160], spent_s
        said = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return (said or lines or ["?"])[-1][:160] if status else "", spent_s

    def _become_child(self, told: Path, limit_s: float) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (round(limit_s), round(limit_s) + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(self._folder)
        out = os.open(told, os.O_WRONLY | os.O_TRUNC | os.O_CREAT, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        paths = [str(self._folder), *(str(self._folder / name) for name in HOUSE)]
        originals = {"", *map(str, (ROOT, *(ROOT / name for name in HOUSE)))}  # the environment is below ROOT, too
        sys.path[:] = [*paths, *(one for one in sys.path if one not in originals)]
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        for name in [name for name in sys.modules if name.split(".")[0] == "tools"]:
            del sys.modules[name]


def _list_tests(mutant: Mutant, room: Room) -> list[str]:
    """Return the tests of a room for a mutant, those of its module first."""
    module = mutant.file[mutant.file.index("/penstock/") + 1 :].removesuffix(".py").replace("/", ".")
    return [name for name in room.tests_of_modules if module in (ROOT / name).read_text()] + [*room.tests]


def _list_files(mutant: Mutant, room: Room) -> list[str]:
    """Return the same as single files, without those that only hold helpers."""
    paths = [ROOT / name for name in _list_tests(mutant, room)]
    files = [file for path in paths for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]
    return [str(file.relative_to(ROOT)) for file in files]


def run_tests(tests: Sequence[str], without: str) -> int:
    """Run tests until one fails. Return 0 if none does."""
    import pytest

    options = ["-q", "-x", "--tb=no", "-pno:cacheprovider", "-Wignore::pytest.PytestAssertRewriteWarning"]
    left_out = ["-k", f"not ({without})"] if without else []
    return int(pytest.main([*options, f"-otimeout={TEST_WALL_S}", *left_out, *tests]))


def play_world(level: str, seed: int, seconds: float) -> int:
    """Play the world for some seconds of processor time, until it finds something. Return 0."""
    words = ["--seed", str(seed), "--seeds", "1000000", "--until-found", "--max-s", str(seconds)]
    # Run as a module named `__main__`, it could not hand its functions to the process in which it plays scenes.
    import_module("sim.world.__main__").main(*words, *(["--level", level] if level else []))
    return 0


def read_list(name: str) -> list[Mutant]:
    """Return a room's list."""
    return [Mutant(**fields) for fields in json.loads((LISTS / f"{name}.json").read_text())]


def write_list(name: str, mutants: Sequence[Mutant]) -> None:
    """Write a room's list, one mutant a line."""
    LISTS.mkdir(exist_ok=True)
    rows = [json.dumps({name: value for name, value in asdict(one).items() if value}) for one in mutants]
    (LISTS / f"{name}.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")


def run_list(name: str, copy: Copy, first: int, played: Sequence[str]) -> None:
    """Play the first mutants of a list of which was `played` what is named, and write after each what noticed it."""
    for index, mutant in enumerate(read_list(name)[:first]):
        if mutant.noticed in played:
            begun_s, result = time.monotonic(), copy.play(mutant, ROOMS[name])
            mutants = read_list(name)  # what was written by hand meanwhile stays
            mutants[index] = replace(mutants[index], noticed=result.noticed, seconds=result.seconds)
            write_list(name, mutants)
            wall_s = time.monotonic() - begun_s
            print(f"{name} {index}: {result.noticed} ({result.seconds:.0f} s, {wall_s:.0f} s on the clock)", flush=True)
            if result.noticed == NOTHING:
                print(f"    {mutant.file}: {mutant.text.strip()!r} -> {mutant.becomes.strip()!r}", flush=True)


def weigh_list(name: str, copy: Copy, count: int) -> None:
    """Weigh the first `count` mutants of a list that were not weighed yet."""
    for index in [index for index, mutant in enumerate(read_list(name)) if not mutant.weighed][:count]:
        weighed = copy.weigh(read_list(name)[index], ROOMS[name]).weighed
        mutants = read_list(name)  # what was written by hand meanwhile stays
        mutants[index] = replace(mutants[index], weighed=weighed)
        write_list(name, mutants)
        print(f"{name} {index}: {weighed}", flush=True)


def try_mutants(name: str, copy: Copy, seed: int, count: int) -> None:
    """Draw mutants, play them, and print each with what noticed it."""
    for mutant in draw_mutants(ROOMS[name], seed, count):
        print(json.dumps(asdict(copy.play(mutant, ROOMS[name]))), flush=True)


def main() -> None:
    """Draw lists, or play them."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants")
    parser.add_argument("what", choices=["draw", "forget", "run", "try", "weigh"])
    parser.add_argument("rooms", nargs="+", choices=list(ROOMS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60, help="how many are drawn, or played of each list")
    parser.add_argument("--world-s", type=float, default=60.0, help="how long the world plays")
    parser.add_argument("--again", action="store_true", help="play again what nothing noticed")
    given = parser.parse_args()
    if given.what in ("draw", "forget"):
        for name in given.rooms:
            is_new = given.what == "draw"
            found = draw_mutants(ROOMS[name], given.seed, given.count) if is_new else read_list(name)
            write_list(name, [replace(one, noticed="", seconds=0.0) for one in found])
        return
    if os.environ.get("PYTHONHASHSEED") != "0":  # else the order of sets differs from run to run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tools.mutants", *sys.argv[1:]])
    for library in PRELOADED:
        import_module(library)
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder:
        copy = Copy(Path(folder), given.world_s)
        for name in given.rooms:
            match given.what:
                case "weigh":
                    weigh_list(name, copy, given.count)
                case "try":
                    try_mutants(name, copy, given.seed, given.count)
                case _:
                    run_list(name, copy, given.count, ["", NOTHING] if given.again else [""])


if __name__ == "__main__":
    main()
