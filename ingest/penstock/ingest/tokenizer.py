"""The tokenizers of served models, for a gateway, in a child process that the first request starts.

A gateway knows no model and imports no model library. The child loads what a worker loads as well, transformers'
tokenizer, so both give the same tokens; it does so without torch. It needs the model's tokenizer files under the name
that the workers report: `demo`, a directory, a GGUF file, or a name of the hub whose files are in the hub's cache on
this machine.
"""

import asyncio
import json
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.config.settings import DEFAULT_CACHE_DIR
from penstock.engine.text.chat_template import ChatTokenizer
from penstock.engine.weights.files import find_model, ignore_progress
from penstock.errors import InternalError, InvalidRequest, ModelLoadError, RequestError, RequestTooLarge, is_failure
from penstock.ingest.errors import ApiError
from penstock.messages import ChatMessage

MAX_TEXT_CHARS = 2**20
MAX_TOKENS = 2**18
"""The most tokens of one text that is made of tokens."""
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 60.0, 20.0
"""How long the child may take to start, and to load a tokenizer; and to answer once it is loaded."""
MAX_LINE_BYTES = 2**26
_MAX_LOADED = 4


class ModelTokenizers:
    """The child process. It answers one request after the other."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def encode_text(self, model: str, text: str, *, special: bool, with_strs: bool) -> "Tokens":
        """Return the tokens of a text, with the tokens that begin each text if `special`. Raises `ApiError`."""
        if len(text) > MAX_TEXT_CHARS:
            raise _too_large(f"{len(text):,} characters", f"{MAX_TEXT_CHARS:,}")
        return Tokens(await self._ask({"model": model, "text": text, "special": special, "with_strs": with_strs}))

    async def encode_chat(
        self,
        model: str,
        turns: Sequence[ChatMessage],
        variables: Mapping[str, Any] | None = None,
        *,
        special: bool = False,
        generation_prompt: bool = True,
        with_strs: bool = False,
        response_template: Mapping[str, Any] | None = None,
    ) -> "Tokens":
        """Return the tokens of a chat as the model's template writes it. Raises `ApiError`.

        `variables` are given to the template beside the turns. `response_template` is the workers' one. A picture is
        one token, which stands for its place.
        """
        given = dict(variables or {})
        num_chars = sum(len(turn.text) for turn in turns) + len(json.dumps(given))
        if num_chars > MAX_TEXT_CHARS:
            raise _too_large(f"{num_chars:,} characters", f"{MAX_TEXT_CHARS:,}")
        how: dict[str, Any] = {"special": special, "generation_prompt": generation_prompt, "with_strs": with_strs}
        how |= {"response_template": response_template, "turns": [turn.model_dump() for turn in turns]}
        return Tokens(await self._ask({"model": model, "variables": given, **how}))

    async def decode_tokens(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with that of special tokens. Raises `ApiError`."""
        if len(token_ids) > MAX_TOKENS:
            raise _too_large(f"{len(token_ids):,} tokens", f"{MAX_TOKENS:,}")
        return str((await self._ask({"model": model, "token_ids": list(token_ids)}))["text"])

    async def close(self) -> None:
        """End the child process."""
        async with self._lock:
            await self._kill()

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        async with self._lock:
            try:
                process = await self._start()
                assert process.stdin is not None
                process.stdin.write(json.dumps(question).encode() + b"\n")
                answer = await _read_line(process, START_TIMEOUT_S)
                if "error" not in answer:
                    answer = await _read_line(process, ANSWER_TIMEOUT_S)
            except BaseException:  # also where the request is cancelled: its answer must not be read as another's
                await self._kill()
                raise
        if (error := answer.get("error")) is not None:
            raise ApiError(**error)
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            await self._kill()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "penstock.ingest.tokenizer",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES,
            )  # fmt: skip
            await _read_line(self._process, START_TIMEOUT_S)
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


class Tokens:
    """The tokens of a text: their ids, and how the vocabulary writes each, if that was asked for."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.token_ids: list[int] = answer["token_ids"]
        self.token_strs: list[str] | None = answer["token_strs"]


async def _read_line(process: asyncio.subprocess.Process, timeout_s: float) -> dict[str, Any]:
    """Return the child's next line. Raises `ApiError` 503 if none comes in time."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(timeout_s):  # `wait_for` loses a caller's cancellation on Python 3.11
            line = await process.stdout.readline()
    except (TimeoutError, ValueError):
        line = b""
    if not line.endswith(b"\n"):
        if process.stdout.at_eof() and await process.wait() == -signal.SIGVTALRM:
            raise InvalidRequest("the chat template takes more than its processor time for these messages")
        message = "the process that tokenizes gave no answer: try again, or with a shorter text"
        raise ApiError(503, message, code="unavailable", headers={"Retry-After": "1"})
    # A long text's tokens are megabytes of JSON.
    answer: dict[str, Any] = await asyncio.to_thread(json.loads, line)
    return answer


def _too_large(given: str, most: str) -> RequestError:
    return RequestTooLarge(f"{given}; at once there may be {most}: send it in parts")


# The child's side.


def _load_tokenizer(name: str) -> Any:
    """Return a model's tokenizer. Raises `ModelLoadError`."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelLoadError(f"it needs pip install transformers jinja2 ({error})") from None
    directory = find_model(name, ignore_progress, Path(DEFAULT_CACHE_DIR).expanduser())
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ModelLoadError(f"there is no usable tokenizer in {directory}: {error}") from error


@lru_cache(maxsize=_MAX_LOADED)
def _open_chats(tokenizer: Any, model: str, response_template: str) -> ChatTokenizer:
    return ChatTokenizer(tokenizer, model, json.loads(response_template), is_in_child=True)


def _answer(question: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Answer one question. Raises `InvalidRequest`."""
    if (token_ids := question.get("token_ids")) is not None:
        if max(token_ids, default=0) >= len(tokenizer):
            raise InvalidRequest(f"token id {max(token_ids)}: the vocabulary has {len(tokenizer):,}")
        return {"text": tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)}
    text = question.get("text")
    if text is None:
        chats = _open_chats(tokenizer, question["model"], json.dumps(question["response_template"]))
        turns = [ChatMessage.model_validate(turn) for turn in question["turns"]]
        chat = chats.render_chat(turns, question["variables"], generation_prompt=question["generation_prompt"])
        ids = chats.tokenize_chat(chat, special=question["special"])
    else:
        ids = tokenizer(text, verbose=False, add_special_tokens=question["special"])["input_ids"]
    return {"token_ids": ids, "token_strs": tokenizer.convert_ids_to_tokens(ids) if question["with_strs"] else None}


def main() -> None:
    """Say that it is ready, and again for each line once its tokenizer is loaded; then answer it.

    It ends when its parent closes the pipe.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    # transformers takes torch for missing then, and is small and fast.
    sys.modules["torch"] = None  # type: ignore[assignment]
    loaded: OrderedDict[str, Any] = OrderedDict()
    _write_line({"ready": True})
    for line in sys.stdin.buffer:
        question = json.loads(line)
        name = question["model"]
        try:
            if name not in loaded:
                loaded[name] = _load_tokenizer(name)
                while len(loaded) > _MAX_LOADED:
                    loaded.popitem(last=False)
            loaded.move_to_end(name)
            _write_line({"ready": True})
            _write_line(_answer(question, loaded[name]))
        except ModelLoadError as error:
            message = (
                f"This gateway has no tokenizer of the model {name!r}: {error}. Put the model's files on the gateway's "
                "machine where the workers have them, or tokenize elsewhere."
            )
            headers = {"x-should-retry": "false"}
            _write_line(
                {"error": {"status": 501, "message": message, "code": "tokenizer_unavailable", "headers": headers}}
            )
        except InvalidRequest as error:
            _write_line({"error": {"status": 400, "message": str(error), "code": error.code}})
        except BaseException as error:  # a bug, or a library's panic, is this text's
            if not is_failure(error):
                raise
            message = f"tokenizing fails: {type(error).__name__}: {str(error)[:200]}"
            _write_line({"error": {"status": 500, "message": message, "code": InternalError.code}})


def _write_line(content: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(content).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
