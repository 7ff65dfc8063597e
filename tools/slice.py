"""`python -m tools.slice`: count the code that a streamed chat crosses from its arrival to its first token.

It starts an embedded stack (Valkey, a prefill worker, a decode worker, a gateway), sends a chat to warm it up, then
chats whose functions are noted in all processes. A function counts that was called, or went on, or called another one,
in each of these chats: what ran in some of them alone, as a heartbeat does, had another reason. A *pass* is one parse,
dump or validation of all of a body, message or job: of what has the chat's prompt, or a job's token ids. A *walk* reads
the text of all turns without parsing or copying it, to size or to place the prompt (`WALKS`). Those of a worker end
when it dumps the first token's event for the log, as it goes on beside the token's way to the client.

Each process is started with a `sitecustomize` that has its threads call `_note_call` for each call of a function. What
is to be noted, a byte in a file says that all processes map: a chat's number, 0 for nothing, and `WRITE` at the end.
"""

import argparse
import ast
import http.client
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import penstock

ROOT = Path(__file__).parents[1]
DIRECTORY_VARIABLE = "SLICE_DIRECTORY"
"""In this directory are the byte that says what to note, and what each process has noted."""
NUM_CHATS = 3
WRITE = 255
"""This in place of a chat's number: what was noted is to be written."""
POLL_S = 0.02
TIMEOUT_S = 540.0
PROMPT_MARK = "slicemark"
"""A word of the prompt of each chat, by which its body and messages are known."""
PROMPT = f"{PROMPT_MARK}: chat number {{}} of those whose way through the pipeline is counted, from its first word on."
JOB_MARK = "token_ids"
JSON_FUNCTIONS = {"dumps", "loads"}
PARSER = "from_json"
"""The function of `pydantic_core` that parses JSON. It is no Python function, so calls of it go through one of ours."""
PASS_FUNCTIONS = {
    "pydantic/main.py": {
        "BaseModel.__init__",
        "BaseModel.model_dump",
        "BaseModel.model_dump_json",
        "BaseModel.model_validate",
        "BaseModel.model_validate_json",
    },
    "pydantic/type_adapter.py": {
        "TypeAdapter.dump_json",
        "TypeAdapter.dump_python",
        "TypeAdapter.validate_json",
        "TypeAdapter.validate_python",
    },
    "json/__init__.py": JSON_FUNCTIONS,
}
"""By file: the functions of libraries that parse, dump or validate, by which the project does."""
WALKS = {
    "core/penstock/bus/placement.py": {"chain_prompt"},
    "ingest/penstock/ingest/gateway/accept.py": {"measure_prompts"},
}
"""By file: the project's functions that read all of a prompt."""


class Function(NamedTuple):
    """A function of the package that ran."""

    file: str
    """Below the repository."""
    line: int
    """Its first line."""
    name: str


class Pass(NamedTuple):
    """A place that parses, dumps or validates a whole body, message or job."""

    process: str
    place: str
    """The file, the line and the function."""
    what: str
    """The library's function, and the class of the message; or `walk` and the project's function."""

    @property
    def is_walk(self) -> bool:
        """Whether it only reads the text."""
        return self.what.startswith("walk ")


@dataclass
class Slice:
    """What ran in each of the chats."""

    functions: dict[str, list[Function]]
    """By file."""
    passes: list[Pass]
    """In the order in which they were made, process by process."""

    def count_lines(self, file: str) -> int:
        """Return the lines of the functions of a file that ran."""
        spans = _find_spans(ROOT / file)
        lines: set[int] = set()
        for function in self.functions[file]:
            around: range = min((span for span in spans if function.line in span), key=len, default=range(0))
            lines |= set(around)
        return len(lines)


# In the processes that are traced.


class _Notes:
    """What this process has noted."""

    def __init__(self, directory: Path) -> None:
        with (directory / "chat").open("rb") as file:
            self.chat = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        self.directory = directory
        self.kinds: dict[CodeType, str] = {}
        self.functions: dict[CodeType, set[int]] = defaultdict(set)
        self.passes: list[tuple[int, Pass]] = []
        self.answered: set[int] = set()
        """The chats whose first token this process has written."""

    def kind_of(self, code: CodeType) -> str:
        """Return the path of a function of the package, the name of one that makes passes, or ""."""
        kind = self.kinds.get(code)
        if kind is None:
            kind = self.kinds[code] = _describe_code(code)
        return kind

    def write(self) -> None:
        """Write all that was noted."""
        functions = [
            [self.kind_of(code), code.co_firstlineno, code.co_qualname, sorted(chats)]
            for code, chats in list(self.functions.items())
        ]
        path = self.directory / f"{os.getpid()}.json"
        path.with_suffix(".part").write_text(json.dumps({"functions": functions, "passes": self.passes}))
        path.with_suffix(".part").rename(path)


_notes: _Notes | None = None


def install_trace() -> None:
    """Note the functions of this process, as the byte says. A process's `sitecustomize` calls this."""
    global _notes  # noqa: PLW0603 - one a process
    _notes = _Notes(Path(os.environ[DIRECTORY_VARIABLE]))
    _wrap_parser()
    threading.Thread(target=_write_when_told, name="slice", daemon=True).start()
    threading.settrace(_note_call)
    sys.settrace(_note_call)


def _wrap_parser() -> None:
    """Replace `from_json` before another module imports it."""
    import pydantic_core

    parse = pydantic_core.from_json

    def from_json(data: Any, **options: Any) -> Any:
        return parse(data, **options)

    pydantic_core.from_json = from_json


def _write_when_told() -> None:
    assert _notes is not None
    while _notes.chat[0] != WRITE:
        time.sleep(POLL_S)
    _notes.write()


def _note_call(frame: FrameType, event: str, argument: object) -> Any:
    """Note a call, or that a coroutine goes on. Python calls this, and what it returns within the function."""
    if _notes is None or (chat := _notes.chat[0]) in (0, WRITE):
        return None
    kind = _notes.kind_of(frame.f_code)
    if kind.startswith("pass ") and chat not in _notes.answered:
        return _note_pass(_notes, chat, kind.removeprefix("pass "), frame)
    if kind.endswith(".py"):
        _notes.functions[frame.f_code].add(chat)
        if frame.f_back is not None and _notes.kind_of(frame.f_back.f_code).endswith(".py"):
            _notes.functions[frame.f_back.f_code].add(chat)
        is_walk = frame.f_code.co_name in WALKS.get(kind, ()) and chat not in _notes.answered
        if is_walk and (made := _describe_pass(_notes, frame, f"walk {frame.f_code.co_name}")) is not None:
            _notes.passes.append((chat, made))
    return None


def _describe_pass(notes: _Notes, frame: FrameType, what: str) -> Pass | None:
    """Return a pass that a function of the package makes; None where none stands above `frame`."""
    caller = frame.f_back
    while caller is not None and not notes.kind_of(caller.f_code).endswith(".py"):
        caller = caller.f_back
    if caller is None:
        return None
    place = f"{notes.kind_of(caller.f_code)}:{caller.f_lineno} {caller.f_code.co_qualname}"
    process = " ".join(word for word in sys.argv[1:3] if not word.startswith("-"))
    return Pass(process, place, what)


def _note_pass(notes: _Notes, chat: int, what: str, frame: FrameType) -> Any:
    """Note a pass, if it is of a whole body, message or job, and the function of the package that makes it.

    What a dump makes is known when it returns: then Python calls the function that this returns.
    """
    arguments = [frame.f_locals[name] for name in frame.f_code.co_varnames[: frame.f_code.co_argcount]]
    if frame.f_code.co_name == "__init__":
        arguments = [type(arguments[0]), frame.f_locals["data"]]
    owner: type | None = next((one if isinstance(one, type) else type(one) for one in arguments[:1]), None)
    name = owner.__name__ if owner is not None and what not in {*JSON_FUNCTIONS, PARSER} else ""
    if name == "TokenEvent":
        notes.answered.add(chat)
    if not any(_is_whole(one, name) for one in arguments):
        return None
    made = _describe_pass(notes, frame, f"{what} {name}".strip())
    if made is None:
        return None
    if "dump" not in what:
        notes.passes.append((chat, made))
        return None

    def note_dump(_: FrameType, event: str, returned: object) -> Any:
        if event == "return" and _is_whole(returned, name):
            notes.passes.append((chat, made))
        return note_dump

    return note_dump


def _is_whole(value: object, name: str) -> bool:
    """Return whether a value has the prompt's text, or is a job with its token ids."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
    return PROMPT_MARK in text or (JOB_MARK in text and (name == "Job" or '"job"' in text))


def _describe_code(code: CodeType) -> str:
    # The environment lies below the repository, too, and that may be called as the package is.
    for portion in penstock.__path__:
        if code.co_filename.startswith(f"{portion}{os.sep}"):
            return "" if code.co_name == "<module>" else os.path.relpath(code.co_filename, Path(portion).parents[1])
    for file, names in PASS_FUNCTIONS.items():
        if code.co_filename.endswith(file) and code.co_qualname in names:
            return f"pass {code.co_qualname.removeprefix('BaseModel.')}"
    if code.co_filename == __file__ and code.co_name == PARSER:
        return f"pass {PARSER}"
    return ""


# In the tool's own process.


def measure_slice(num_chats: int = NUM_CHATS) -> Slice:
    """Return what ran in each of so many chats, over all processes of a stack of its own. Takes half a minute."""
    from penstock.local.processes import find_free_port  # these come late: the processes that are traced import this
    from penstock.local.stack import Stack
    from penstock.waiting import wait_until
    from tools.rooms import PORTIONS

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "chat").write_bytes(b"\0")
        (directory / "sitecustomize.py").write_text("from tools import slice\n\nslice.install_trace()\n")
        paths = [directory, ROOT, *PORTIONS, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), DIRECTORY_VARIABLE: scratch}
        with Stack(directory / "stack", gateway=find_free_port(), environment=environment) as stack:
            stack.wait_until_ready(TIMEOUT_S)
            port = int(stack.gateway_url.rpartition(":")[2])
            with (directory / "chat").open("r+b") as file, mmap.mmap(file.fileno(), 1) as byte:
                _send_chat(port, 0, byte)
                for chat in range(1, num_chats + 1):
                    _send_chat(port, chat, byte)
                byte[0] = WRITE
            slots = [*stack.workers, *([stack.gateway] if stack.gateway else [])]
            files = [directory / f"{slot.child.pid}.json" for slot in slots if slot.child is not None]
            wait_until(
                lambda: all(file.exists() for file in files), TIMEOUT_S, "all processes have written their notes"
            )
        return merge_notes((json.loads(file.read_text()) for file in files), num_chats)


def _send_chat(port: int, chat: int, byte: mmap.mmap) -> None:
    """Send a chat, and read all of its answer. The processes note what runs until the first token came."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": PROMPT.format(chat)}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        byte[0] = chat
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"the gateway answered {answer.status}: {answer.read().decode()}")
        for line in answer:
            if line.startswith(b"data: {") and has_token(json.loads(line[6:])):
                byte[0] = 0
    finally:
        byte[0] = 0
        connection.close()


def has_token(chunk: Mapping[str, Any]) -> bool:
    """Return whether a chunk of a chat's stream has a token, and is not the first one, which has the role alone."""
    return any("content" in choice["delta"] and "role" not in choice["delta"] for choice in chunk["choices"])


def merge_notes(notes: Iterable[Mapping[str, Any]], num_chats: int) -> Slice:
    """Return what ran in each of the chats, of the notes of all processes."""
    functions: dict[str, set[Function]] = defaultdict(set)
    passes: list[Pass] = []
    for note in notes:
        for file, line, name, chats in note["functions"]:
            if len(chats) == num_chats:
                functions[file].add(Function(file, line, name))
        made = [Counter(Pass(*one) for chat, one in note["passes"] if chat == n) for n in range(1, num_chats + 1)]
        always = {one: min(counts[one] for counts in made) for one in made[0]}
        passes += [one for one, count in always.items() for _ in range(count)]
    return Slice({file: sorted(found) for file, found in sorted(functions.items())}, passes)


def _find_spans(path: Path) -> list[range]:
    """Return the lines of each function of a file, with its decorators."""
    spans = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            spans.append(range(first, node.end_lineno + 1))
    return spans


def print_slice(found: Slice) -> None:
    """Print the files by folder, the passes, and the sums."""
    lines = {file: found.count_lines(file) for file in found.functions}
    for folder in sorted({Path(file).parent for file in lines}):
        inside = [file for file in lines if Path(file).parent == folder]
        print(f"{folder}: {len(inside)} files, {sum(lines[file] for file in inside):,} lines")
        for file in inside:
            print(f"    {Path(file).name:24} {lines[file]:5,} lines in {len(found.functions[file])} functions")
    print("Passes over a whole body, message or job, and walks:")
    for one in found.passes:
        print(f"    {one.process}: {one.what}, {one.place}")
    num_walks = sum(one.is_walk for one in found.passes)
    num_passes = len(found.passes) - num_walks
    print(f"{len(lines)} files, {sum(lines.values()):,} lines, {num_passes} passes, {num_walks} walks")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tools.slice", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the files, functions and passes there")
    path: Path | None = parser.parse_args().json
    found = measure_slice()
    print_slice(found)
    if path is not None:
        lines = {file: found.count_lines(file) for file in found.functions}
        described = {"lines": lines, "functions": found.functions, "passes": [one._asdict() for one in found.passes]}
        path.write_text(json.dumps(described, indent=1) + "\n")


if __name__ == "__main__":
    main()
