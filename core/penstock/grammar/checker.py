"""Checking a grammar before its request is published, in a process of its own.

A grammar that is known to be hostile is refused before it is compiled (`schema.py`), and compiling has limits
(`engine.py`). An unknown grammar may still crash the engine, hang it or take all memory. A child process therefore
compiles each grammar first, and is killed if it does not answer. The gateway and the worker compile only afterwards.

A gateway knows no model and checks with a vocabulary of bytes. A prefill worker checks every grammar again, with its
model's tokenizer: the masks of some grammars take too much work only where tokens are long.
"""

import contextlib
import json
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from penstock.errors import (
    REQUEST_ERRORS,
    GrammarFailed,
    InternalError,
    InvalidRequest,
    RequestError,
    UnsupportedSchema,
)
from penstock.grammar.loosen import LoosenedGrammar, loosen_grammar
from penstock.messages import ErrorInfo, GrammarSpec, decode_message

if TYPE_CHECKING:
    from penstock.grammar.engine import GrammarTokenizer

K = TypeVar("K")
V = TypeVar("V")
START_TIMEOUT_S = 60.0
"""The longest start of the child in seconds, on a busy machine."""
CHECK_S = 5.0
"""The most processor time of a check."""
ANSWER_TIMEOUT_S = 60.0
"""It ends hangs only: a machine that does other things may take long for what costs little."""
MAX_CHECKER_BYTES = 2**31
MAX_REMEMBERED_GRAMMARS = 4096
MAX_PROBED_MASK_S = 0.05
"""The most processor time of a mask in the check."""
_NUM_PROBED_TOKENS = 32


@dataclass(frozen=True)
class Vocabulary:
    """The data of a tokenizer of the grammar engine (`GrammarTokenizer.from_json`)."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class _Remembered(Generic[K, V]):
    """The latest used `MAX_REMEMBERED_GRAMMARS` outcomes of checks."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[K, V] = OrderedDict()

    def find(self, key: K) -> V | None:
        """Return what was kept under a key, which is used now; None if nothing is."""
        if key in self._outcomes:
            self._outcomes.move_to_end(key)
        return self._outcomes.get(key)

    def keep(self, key: K, outcome: V) -> V:
        """Keep an outcome, and return it."""
        self._outcomes[key] = outcome
        self._outcomes.move_to_end(key)
        while len(self._outcomes) > MAX_REMEMBERED_GRAMMARS:
            self._outcomes.popitem(last=False)
        return outcome


class GrammarChecker:
    """A child process that checks grammars one after the other. Any thread may use it; it may wait for seconds."""

    def __init__(self, vocabulary: Vocabulary | None = None) -> None:
        """Masks are tried with the vocabulary; without one, with the 256 bytes."""
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        """Whether the child has said that it is ready."""
        self._checked = _Remembered[str, GrammarSpec]()
        self._loosened = _Remembered[tuple[str, frozenset[str]], LoosenedGrammar]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check_grammar(self, spec: GrammarSpec) -> GrammarSpec:
        """Return a grammar with the engine's version that can use it.

        Raises `UnsupportedSchema` or `InvalidRequest`, the latter also if it takes more than `CHECK_S`;
        `InternalError` if the child process does not start.
        """
        with self._lock:
            if (known := self._checked.find(spec.digest)) is not None:
                return known
            return self._checked.keep(spec.digest, self._ask(spec))

    def loosen_grammar(self, spec: GrammarSpec, names: frozenset[str]) -> LoosenedGrammar:
        """Return a grammar that passes `check_grammar`, as the schemas of tools with these names lack what does not.

        Raises as `check_grammar` where anything else is refused.
        """
        key = spec.digest, names
        with self._lock:
            if (known := self._loosened.find(key)) is not None:
                return known
        loosened = loosen_grammar(spec, names, self.check_grammar)
        with self._lock:
            return self._loosened.keep(key, loosened)

    def start(self) -> None:
        """Start the child process, and do not wait until it is ready. `check_grammar` starts it, too."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._kill()

    def _ask(self, spec: GrammarSpec) -> GrammarSpec:
        process = self._start()
        assert process.stdin is not None
        if not self._is_ready and not _read_line(process, START_TIMEOUT_S):
            self._kill()
            raise InternalError("the process that checks grammars does not start")
        self._is_ready = True
        answer = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(spec.encode() + b"\n")
            process.stdin.flush()
            answer = _read_line(process, ANSWER_TIMEOUT_S)
        if not answer:
            self._kill()
            raise InvalidRequest("the grammar is too complex: it could not be checked")
        reply = json.loads(answer)
        if "error" in reply:
            raise _read_error(reply["error"])
        return decode_message(GrammarSpec, json.dumps(reply["spec"]).encode())

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            with tempfile.TemporaryFile() as file:  # a pipe would have to be written while the child starts
                file.write(json.dumps(self._vocabulary and asdict(self._vocabulary)).encode())
                file.seek(0)
                command = [sys.executable, "-m", "penstock.grammar.checker", str(file.fileno()), str(CHECK_S)]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file.fileno()]
                )
            self._is_ready = False
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _read_line(process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
    """Return the child's next line, which it writes at once; empty if none comes in time, or the child ends."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        return b""
    line = process.stdout.readline()
    return line if line.endswith(b"\n") else b""


# The child's side.


def probe_grammar(spec: GrammarSpec, tokenizer: "GrammarTokenizer") -> GrammarSpec:
    """Compile a grammar, go some random tokens into it, and return it with its engine.

    Raises `UnsupportedSchema` or `InvalidRequest`.
    """
    import numpy as np

    from penstock.grammar.engine import ENGINE_VERSION, CompiledGrammar
    from penstock.grammar.state import GrammarState

    state = GrammarState(CompiledGrammar(spec, tokenizer))
    row = np.zeros(tokenizer.num_mask_words, np.int32)
    draw = random.Random(0)
    try:
        for _ in range(_NUM_PROBED_TOKENS):
            started = time.thread_time()
            state.fill_mask(row)
            if time.thread_time() - started > MAX_PROBED_MASK_S:
                raise InvalidRequest("the grammar is too complex: its masks take too long")
            if state.is_ended:
                break
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            open_ids = [int(one) for one in allowed if int(one) not in tokenizer.eos_token_ids]
            state.advance([draw.choice(open_ids)])
    except GrammarFailed as error:
        raise InvalidRequest(f"the grammar is too complex: {error}") from None
    return spec.model_copy(update={"engine": ENGINE_VERSION})


def _read_error(error: dict[str, str]) -> RequestError:
    if error["code"] == UnsupportedSchema.code:
        return UnsupportedSchema.at_keyword(error["keyword"], error["path"], error["reason"])
    return REQUEST_ERRORS[error["code"]](error["message"])


def _reply(line: bytes, tokenizer: "GrammarTokenizer") -> dict[str, object]:
    try:
        return {"spec": probe_grammar(decode_message(GrammarSpec, line), tokenizer).model_dump()}
    except UnsupportedSchema as error:
        fields = {"keyword": error.keyword, "path": error.path, "reason": error.reason}
        return {"error": {"code": error.code, **fields}}
    except RequestError as error:
        return {"error": ErrorInfo.from_error(error).model_dump()}


def main() -> None:
    """Say that it is ready, then answer a line for each line. It ends when its parent closes the pipe, and by `SIGPROF`
    when a check takes too much processor time.
    """
    from penstock.grammar.engine import GrammarTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (MAX_CHECKER_BYTES, MAX_CHECKER_BYTES))
    with open(int(sys.argv[1]), "rb") as file:
        vocabulary = json.load(file)
    tokenizer = GrammarTokenizer.make_bytes() if vocabulary is None else GrammarTokenizer.from_json(**vocabulary)
    _write_line({"ready": True})
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
        reply = _reply(line, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write_line(reply)


def _write_line(content: dict[str, object]) -> None:
    sys.stdout.buffer.write(json.dumps(content).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
