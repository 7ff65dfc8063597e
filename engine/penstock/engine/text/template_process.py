"""A chat template is a program of whoever published the model: it is rendered within limits, in a child process.

A template may run for any time and take any memory, by itself or by what a request gives it. Python cannot limit one
call, so a worker, which must go on, has a child that renders:

    1  the worker writes the chat as a line of JSON, with the template where the child does not have it yet
    2  the child marks the texts of users (`penstock.engine.text.marked_text`), renders under a timer of processor time
       and a limit of memory, and answers with a line, and the text as it is
    3  the worker reads both: the text with its marks, what the template said of the messages, or which limit it
       exceeded

What a crash costs: where the timer cannot interrupt the template (a single long operation in C), the kernel ends the
child a second or two later, and another one is started. The request that was asked for exceeded its time then. A
gateway's tokenizer is a child of its own, and renders within the same limits (`limit_rendering`).
"""

import atexit
import contextlib
import gc
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from penstock.engine.text.marked_text import compile_template, render_marked
from penstock.errors import InternalError

BASE_S, COMPILE_S, S_PER_BYTE = 0.25, 2.0, 1e-6
"""Processor time of a rendering, of compiling a template before its first one, and for each byte of a chat."""
MAX_BYTES = 2**29
"""The memory that a rendering may take."""
MAX_TEXT_CHARS = 2**25
MAX_REASON_CHARS = 1000
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 60.0, 60.0
"""How long the child may take to start, and to answer, on a machine that does other things."""
QUICK_S = 0.02
"""A caller that may not wait waits so long. A usual chat takes less than a millisecond."""


class Template(NamedTuple):
    """A chat template."""

    source: str
    pattern: str
    """Finds the control tokens of its model."""


_Question = tuple[Template, bytes]
"""A template, and a chat as JSON."""


class OverBudget(BaseException):
    """A template exceeded a limit. It is no `Exception`, so that nothing that renders takes it for one of its own."""


class TakesTime(Exception):
    """A rendering takes longer than its caller may wait. Asking for it again goes on with it."""


@contextlib.contextmanager
def limit_rendering(time_s: float) -> Iterator[None]:
    """Raise `OverBudget` in this context after so much processor time, or at a lack of memory. For the main thread.

    A call that cannot be interrupted ends the process with `SIGVTALRM`.
    """
    armed = [True]

    def interrupt(_signal: int, _frame: object) -> None:
        if armed:
            raise OverBudget(f"more than {time_s:.2g} s of processor time")

    limits = dict[int, int]()
    with contextlib.suppress(OSError):  # Linux says how much there is already; other systems keep no such limit
        num_pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        limits[resource.RLIMIT_AS] = num_pages * resource.getpagesize() + MAX_BYTES
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, limit in limits.items():
        most = before[kind][1]
        resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    handler = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, time_s)
    # Both timers begin at zero here. RLIMIT_CPU counts from the process's start, and by another clock than `getrusage`:
    # with a limit of that kind a process that had run for minutes was ended in a rendering of milliseconds.
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * time_s + 2.0)
    try:
        yield
    except MemoryError:
        raise OverBudget(f"more than {MAX_BYTES >> 20} MiB of memory") from None
    finally:
        armed.clear()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGPROF, handler)
        for kind, both in before.items():
            resource.setrlimit(kind, both)


class TemplateProcess:
    """The child process, which renders one chat after the other. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._template: Template | None = None
        """The template that the child has."""
        self._asked: _Question | None = None
        """The question that the child has, and whose answer was not read."""
        self._kept: tuple[_Question | None, dict[str, str]] = (None, {})
        """A question whose caller did not wait, and its answer."""

    def start(self) -> None:
        """Start the child process where there is none, and do not wait until it is ready."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._kill()

    def forget(self) -> None:
        """Leave the child to the process that this one is a fork of."""
        self.__dict__ |= TemplateProcess().__dict__ | {"_left": self._process}

    def render(self, template: Template, chat: Mapping[str, Any], *, may_wait: bool = True) -> dict[str, str]:
        """Return what came of a rendering: `text` with `mark`, what the template said as `refused`, or the limit as
        `over`.

        `chat` has the `messages`, the `variables` of the request, and the model's `own` ones. Without `may_wait` raise
        `TakesTime` where the answer is not there soon. Raise `InternalError` where the child does not start, or ends.
        """
        question = (template, json.dumps(chat).encode())
        if not self._lock.acquire(blocking=may_wait):
            raise TakesTime
        try:
            if self._kept[0] != question:
                return self._ask(question, may_wait=may_wait)
            (_, answer), self._kept = self._kept, (None, {})
            return answer
        finally:
            self._lock.release()

    def _ask(self, question: _Question, *, may_wait: bool) -> dict[str, str]:
        process = self._start()
        assert process.stdin is not None
        if not self._is_ready:
            if self._read_answer(START_TIMEOUT_S if may_wait else 0.0, may_wait=may_wait) != {"ready": ""}:
                raise InternalError("the process that renders chat templates does not start")
            self._is_ready = True
        if self._asked not in (None, question):
            if not may_wait:
                raise TakesTime
            self._kept = (self._asked, self._read_answer(ANSWER_TIMEOUT_S, may_wait=True))
            return self._ask(question, may_wait=may_wait)
        if self._asked is None:
            template, chat = question
            head = b"" if template == self._template else json.dumps({"template": template}).encode() + b"\n"
            self._template, self._asked = template, question
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(head + chat + b"\n")
                process.stdin.flush()
        answer = self._read_answer(ANSWER_TIMEOUT_S if may_wait else QUICK_S, may_wait=may_wait)
        if "ended" in answer:
            raise InternalError(answer["ended"])
        return answer

    def _read_answer(self, timeout_s: float, *, may_wait: bool) -> dict[str, str]:
        """Return the child's next line. Where it ends before, say so and start another."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        is_there = bool(select.select([process.stdout], [], [], timeout_s)[0])
        if not is_there and not may_wait:
            raise TakesTime
        answer = _read_line(process.stdout) if is_there else None
        self._asked = None
        if answer is not None:
            return answer
        if is_there:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it has closed the pipe, and says by what it ended
                process.wait(ANSWER_TIMEOUT_S)
        self._kill()
        self._start()
        if process.returncode == -signal.SIGVTALRM:
            return {"over": "more than its processor time, in one operation"}
        return {"ended": f"the process that renders chat templates ended with {process.returncode}"}

    def _start(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            command = [sys.executable, "-m", "penstock.engine.text.template_process"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._is_ready, self._template, self._asked = False, None, None
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _read_line(stream: IO[bytes]) -> dict[str, str] | None:
    """Return what `_write_line` has written; None where the child ended before."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        return None
    content: dict[str, Any] = json.loads(line)
    if "text" in content:
        text = stream.read(content["text"])
        if len(text) < content["text"]:
            return None
        content["text"] = text.decode(errors="surrogatepass")
    return content


shared_process = TemplateProcess()
"""The template process of this process."""
atexit.register(shared_process.close)
os.register_at_fork(after_in_child=shared_process.forget)


# The child's side.


def render_within_limits(template: Template, chat: bytes) -> dict[str, str]:
    """Return what came of a rendering, as `TemplateProcess.render` does, in this process. `chat` is a line of JSON."""
    try:
        with limit_rendering(COMPILE_S):
            pattern, _ = re.compile(template.pattern), compile_template(template.source)
        with limit_rendering(BASE_S + S_PER_BYTE * len(chat)):
            text = render_marked(template.source, pattern, json.loads(chat))
            if len(text) > MAX_TEXT_CHARS:
                raise OverBudget(f"more than {MAX_TEXT_CHARS:,} characters")
        return {"text": str.__str__(text), "mark": text.text_mark}
    except OverBudget as error:
        return {"over": str(error)}
    except Exception as error:  # a template may raise anything about what it is given
        return {"refused": str(error)[:MAX_REASON_CHARS]}


def main() -> None:
    """Say that it is ready, then answer each line of variables. It ends when its parent closes the pipe."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers.utils import chat_template_utils

    assert chat_template_utils
    template = Template("", "")
    _write_line({"ready": ""})
    for line in sys.stdin.buffer:
        if line.startswith(b'{"template": '):
            template = Template(*json.loads(line)["template"])
            continue
        answer = render_within_limits(template, line)
        _write_line(answer)
        if "text" not in answer:
            gc.collect()


def _write_line(content: Mapping[str, str]) -> None:
    """Write a line of JSON. A `text` follows it as it is, since it may be long: the line has its number of bytes."""
    text = content.get("text", "").encode(errors="surrogatepass")
    line = {**content, "text": len(text)} if "text" in content else content
    sys.stdout.buffer.write(json.dumps(line).encode() + b"\n" + text)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
