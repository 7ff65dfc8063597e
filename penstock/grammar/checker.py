"""Checking a grammar before its request is published, in a process of its own.

What is known to be hostile is refused before it is compiled (`schema.py`), and compiling has limits (`engine.py`).
What is left is what nobody knows yet: a grammar on which the engine crashes, hangs or takes all memory. So it is
compiled first in a child process, which is killed if it does not answer, and not in the gateway or the worker.
"""

import json
import random
import resource
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from typing import Self

from penstock.errors import REQUEST_ERRORS, GrammarFailed, InvalidRequest, RequestError, UnsupportedSchema
from penstock.messages import ErrorInfo, GrammarSpec, decode_message

CHECK_TIMEOUT_S = 5.0
MAX_CHECKER_BYTES = 2**31
MAX_REMEMBERED_GRAMMARS = 4096
MAX_PROBED_MASK_S = 0.05
"""The most processor time of a mask, of the 256 bytes, in the check."""
_NUM_PROBED_TOKENS = 32


class GrammarChecker:
    """A child process that checks grammars one after the other. Any thread may use it; it may wait for seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._checked: OrderedDict[str, GrammarSpec] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check_grammar(self, spec: GrammarSpec) -> GrammarSpec:
        """Return a grammar with the engine's version that can use it.

        Raises `UnsupportedSchema` or `InvalidRequest`, the latter also if it takes longer than `CHECK_TIMEOUT_S`.
        """
        with self._lock:
            if (known := self._checked.get(spec.digest)) is not None:
                self._checked.move_to_end(spec.digest)
                return known
            checked = self._ask(spec)
            self._checked[spec.digest] = checked
            while len(self._checked) > MAX_REMEMBERED_GRAMMARS:
                self._checked.popitem(last=False)
            return checked

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._kill()

    def _ask(self, spec: GrammarSpec) -> GrammarSpec:
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = b""
        try:
            process.stdin.write(spec.encode() + b"\n")
            process.stdin.flush()
            if select.select([process.stdout], [], [], CHECK_TIMEOUT_S)[0]:
                answer = process.stdout.readline()  # the child writes a line at once
        except BrokenPipeError:
            pass
        if not answer.endswith(b"\n"):
            self._kill()
            raise InvalidRequest("the grammar is too complex: it could not be checked")
        reply = json.loads(answer)
        if "error" in reply:
            raise _read_error(reply["error"])
        return decode_message(GrammarSpec, json.dumps(reply["spec"]).encode())

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            command = [sys.executable, "-m", "penstock.grammar.checker"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def probe_grammar(spec: GrammarSpec) -> GrammarSpec:
    """Compile a grammar for a tokenizer of bytes, go some random tokens into it, and return it with its engine.

    Raises `UnsupportedSchema` or `InvalidRequest`.
    """
    import numpy as np

    from penstock.grammar.engine import ENGINE_VERSION, CompiledGrammar, GrammarTokenizer
    from penstock.grammar.state import GrammarState

    tokenizer = GrammarTokenizer.make_bytes()
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


def _reply(line: bytes) -> dict[str, object]:
    try:
        return {"spec": probe_grammar(decode_message(GrammarSpec, line)).model_dump()}
    except UnsupportedSchema as error:
        fields = {"keyword": error.keyword, "path": error.path, "reason": error.reason}
        return {"error": {"code": error.code, **fields}}
    except RequestError as error:
        return {"error": ErrorInfo.from_error(error).model_dump()}


def main() -> None:
    """Answer a line for each line: the child's side. It ends when its parent closes the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_CHECKER_BYTES, MAX_CHECKER_BYTES))
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(_reply(line)).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
