"""The answer of an endpoint to one question, read on a thread and handed to the loop piece by piece.

An answer ends in exactly one of three events: `Finished`; `Refused`, which is the request's fault; and `Failed`, which
may be the fault of the request or of the endpoint. After `cut` was called no further event is used.
"""

import codecs
import contextlib
import email.message
import email.utils
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.endpoint_worker.answer import AnswerWriter, Piece
from penstock.endpoint_worker.endpoints import MAX_TOLD_PAUSE_S, UNREACHABLE, Endpoint
from penstock.endpoint_worker.question import Question
from penstock.errors import (
    AnswerInterrupted,
    InvalidRequest,
    ModelError,
    PromptTooLong,
    RequestError,
    RequestTooLarge,
    is_failure,
)
from penstock.messages import FinishReason, Usage, now_s, replace_surrogates

CONNECT_TIMEOUT_S = 5.0
MODELS_TIMEOUT_S = 5.0
"""Seconds that an endpoint may take to connect, and to list its models."""
MAX_ERROR_BYTES = 65_536
"""The number of bytes that are read of an endpoint's error."""
MAX_LINE_BYTES = 2**24
MAX_TOLD_TOKENS = 2**53
"""The largest token count that is believed: readers of JSON in other languages hold no larger integer exactly."""
MAX_INTERIM_ANSWERS = 16
"""The most interim responses (HTTP 100 to 199) before the final one."""
INVALID_STATUSES = (400, 403, 413, 415, 422, 451)
"""HTTP statuses that mean an invalid request, if the refusal is the request's fault."""
BUSY_STATUSES = (429, 503)
MAX_SILENCE_S = 20.0
"""While nothing is told of an answer, readers get an empty piece each time after so long: they give up in silence."""
CONTINUING_OWNERS = ("vllm", "sglang")
"""`owned_by` of the models of servers that have `continue_final_message`."""


@dataclass(frozen=True)
class Begun:
    """The endpoint answers, with something that is told later or not at all."""


@dataclass(frozen=True)
class Finished:
    """The end of an answer."""

    reason: FinishReason
    usage: Usage | None
    """The tokens that the endpoint has counted, if it reports them."""
    stop: str | None = None
    """The stop string that ended the answer, if the endpoint reports it, as vLLM does."""


@dataclass(frozen=True)
class Refused:
    """The endpoint cannot answer this request, and no other one can."""

    error: RequestError
    has_begun: bool = True
    """Whether it began to answer, and so answers requests."""


@dataclass(frozen=True)
class Failed:
    """The endpoint did not answer, or not to the end."""

    cause: str
    """The kind of failure in one word: the HTTP status, or another word. Failures with the same word are alike."""
    problem: str
    """The failure, in the endpoint's own words."""
    is_asked: bool = True
    """Whether the question was sent: else the endpoint cannot be reached."""
    may_have_begun: bool = True
    """Whether it may have computed a part of the answer."""
    is_lost: bool = False
    """Whether the connection was lost after the question was sent."""
    is_busy: bool = False
    wait_s: float | None = None
    """The pause in seconds that the endpoint asks for."""
    error: RequestError | None = None
    """The error with which the request ends if the failure was its fault; None for a `ModelError`."""


ReplyEvent = Begun | Piece | Finished | Refused | Failed


class _FailedError(Exception):
    """Ends the reading of an answer."""

    def __init__(self, end: Failed | Refused) -> None:
        super().__init__()
        self.end = end


class ModelsRefused(OSError):
    """An endpoint does not list its models."""


class EndpointReply:
    """An answer that is being read. Only the loop calls its methods."""

    def __init__(
        self,
        endpoint: Endpoint,
        question: Question,
        writer: AnswerWriter,
        silence_s: float,
        report: "Callable[[EndpointReply, ReplyEvent], None]",
    ) -> None:
        """`writer` writes the answer. `report` is called on the answer's thread with each event."""
        self.endpoint, self.question = endpoint, question
        self.is_cut = False
        self._writer, self._reported_s, self._has_begun = writer, time.monotonic(), False
        self._silence_s, self._report = silence_s, report
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="answer", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Close the connection, which tells the endpoint to stop."""
        with self._lock:
            self.is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def is_alive(self) -> bool:
        """Whether its thread still runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread is over, for at most `timeout_s`."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._report(self, self._read())
        except BaseException as error:  # a bug: this answer's
            if not is_failure(error):
                raise
            self._report(self, Failed("unreadable", f"{type(error).__name__}: {error}"))

    def _read(self) -> Finished | Refused | Failed:
        is_sent = False
        try:
            with contextlib.closing(open_connection(self.endpoint.url, CONNECT_TIMEOUT_S)) as connection:
                if self.question.continues_chat:
                    self._check_chat_continues()
                connection.connect()
                self._keep_socket(connection.sock)
                is_sent = True
                own = {"Content-Type": "application/json", "Accept": "text/event-stream"}
                headers = build_headers(self.endpoint.key) | own
                connection.request(
                    "POST", find_path(self.endpoint.url, self.question.path), self.question.body, headers
                )
                response = connection.getresponse()
                skip_interim_answers(response)
                check_status(response)
                return self._read_stream(read_events(response))
        except _FailedError as failed:
            return failed.end
        except (OSError, http.client.HTTPException) as error:
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            if not is_sent:
                return Failed(UNREACHABLE, text, is_asked=False, may_have_begun=False)
            is_lost = isinstance(error, OSError | http.client.IncompleteRead)
            return Failed("lost" if is_lost else "no_http", text, is_lost=is_lost)

    def _keep_socket(self, connected: socket.socket) -> None:
        connected.settimeout(self._silence_s)
        with self._lock:
            if self.is_cut:
                raise ConnectionAbortedError("the answer is not wanted any more")
            self._socket = connected

    def _check_chat_continues(self) -> None:
        if self.endpoint.continues_chats is None:
            try:
                models = list_models(self.endpoint.url, self.endpoint.key)
            except ModelsRefused as error:
                raise _FailedError(Failed("models", str(error), may_have_begun=False)) from None
            owners = {str(one.get("owned_by")) for one in models}
            self.endpoint.continues_chats = bool(owners.intersection(CONTINUING_OWNERS))
        if not self.endpoint.continues_chats:
            unable = AnswerInterrupted("this endpoint cannot go on with the last turn of a chat")
            raise _FailedError(Refused(unable, has_begun=False))

    def _read_stream(self, events: Iterator[Mapping[str, Any]]) -> Finished:
        """Report all text, and return the end. Raises `_FailedError` for an answer without one."""
        reason: FinishReason | None = None
        usage: Usage | None = None
        stop: str | None = None
        for event in events:
            usage = read_usage(event) or usage
            # The question asked for one answer: a choice with another number is ignored.
            for choice in (one for one in event.get("choices") or () if one.get("index") in (None, 0)):
                self._report_pieces(self._write_choice(choice))
                reason = read_finish_reason(choice) or reason
                stop = replace_surrogates(told) if isinstance(told := choice.get("stop_reason"), str) else stop
        if reason is None:
            raise _FailedError(Failed("lost", "the answer was cut", is_lost=True))
        self._report_pieces(self._writer.end_answer())
        return Finished(reason, usage, stop)

    def _write_choice(self, choice: Mapping[str, Any]) -> Sequence[Piece]:
        delta = choice.get("delta")
        if isinstance(delta, Mapping) and delta.get("function_call"):
            raise _FailedError(Refused(ModelError("the endpoint calls by 'function_call', which was not asked for")))
        try:
            return self._writer.add_choice(choice)
        except ModelError as error:
            raise _FailedError(Refused(error)) from None

    def _report_pieces(self, pieces: Sequence[Piece]) -> None:
        now_s = time.monotonic()
        if not pieces and self._writer.is_silent:
            if not self._has_begun:
                self._report(self, Begun())
                self._has_begun = True
            if now_s > self._reported_s + MAX_SILENCE_S:
                pieces = [Piece("")]
        for piece in pieces:
            self._report(self, piece)
            self._reported_s = now_s


def open_connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """Return a connection to an endpoint, which connects when it is used."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)


def find_path(url: str, path: str) -> str:
    """Return the path of a POST or GET at an endpoint."""
    return urlsplit(url).path + path


def build_headers(key: str) -> dict[str, str]:
    """Return the headers of everything that is sent to an endpoint."""
    return {"User-Agent": "penstock"} | ({"Authorization": f"Bearer {key}"} if key else {})


def list_models(url: str, key: str) -> list[dict[str, Any]]:
    """Return the models of an endpoint, as it describes them.

    Raises `OSError` where it cannot be reached, and `ModelsRefused` where it answers otherwise.
    """
    with contextlib.closing(open_connection(url, MODELS_TIMEOUT_S)) as connection:
        try:
            connection.request("GET", find_path(url, "/models"), headers=build_headers(key))
            response = connection.getresponse()
            content = response.read(MAX_LINE_BYTES)
            if response.status != 200:
                raise ModelsRefused(f"HTTP {response.status} to GET /models: {describe_error(content)}")
            return [one for one in json.loads(content)["data"] if isinstance(one.get("id"), str)]
        except (http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelsRefused(f"the list of models cannot be read: {type(error).__name__}: {error}") from None


def skip_interim_answers(response: http.client.HTTPResponse) -> None:
    """Read up to the final response. `http.client` skips HTTP 100 alone; 101 is final and ends the request."""
    for _ in range(MAX_INTERIM_ANSWERS):
        if not 101 < response.status < 200:
            return
        response.headers = None  # type: ignore[assignment] # so that it reads further headers
        response.begin()


def check_status(response: http.client.HTTPResponse) -> None:
    """Raise `_FailedError` for an answer that is no stream."""
    status = response.status
    if status == 200:
        kind, encoding = response.headers.get_content_type(), response.headers.get("content-encoding", "").strip()
        if encoding.lower() not in ("", "identity"):
            raise _FailedError(Failed("encoded", f"the endpoint sent {encoding}, which was not asked for"))
        if kind != "text/event-stream":
            raise _FailedError(Failed("no_stream", f"the endpoint does not stream, it sent {kind}"))
        return
    where = f" to {response.headers['location'][:200]}" if "location" in response.headers else ""
    wait_s = parse_retry_after(response.headers) if status in BUSY_STATUSES else None
    raise _FailedError(judge_status(status, where + ": " + describe_error(response.read(MAX_ERROR_BYTES)), wait_s))


def judge_status(status: int, text: str, wait_s: float | None = None) -> Refused | Failed:
    """Return the meaning of an HTTP status, or of one in the stream. A request that is too large is at fault itself."""
    refused = f"the endpoint refused the request: HTTP {status}{text}"
    if status == 413:
        return Refused(RequestTooLarge(refused), has_begun=False)
    if status in (400, 422) and ("context length" in text.lower() or "context_length" in text.lower()):
        return Refused(PromptTooLong(refused), has_begun=False)
    return Failed(
        str(status),
        f"HTTP {status}{text}",
        may_have_begun=status >= 500 and status != 503,
        is_busy=status in BUSY_STATUSES,
        wait_s=None if wait_s is None else min(wait_s, MAX_TOLD_PAUSE_S),
        error=InvalidRequest(refused) if status in INVALID_STATUSES else None,
    )


def describe_error(content: bytes) -> str:
    """Return the message in an error's body, in any of the usual forms, else the beginning of the body."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        found = json.loads(content)
        inner = found.get("error", found.get("detail", found))
        message = inner.get("message") if isinstance(inner, dict) else inner
        if isinstance(message, str):
            code = inner.get("code") if isinstance(inner, dict) else None
            text = f"{message} ({code})" if isinstance(code, str) and code not in message else message
            return replace_surrogates(text)
    return content[:200].decode(errors="replace")


def parse_retry_after(headers: email.message.Message) -> float | None:
    """Return how many seconds an endpoint asks to be left alone; None where it does not say."""
    with contextlib.suppress(ValueError):
        return (
            max(0.0, float(headers["retry-after-ms"]) / 1000) if headers.get("retry-after-ms") else _parse_date(headers)
        )
    return None


def _parse_date(headers: email.message.Message) -> float | None:
    text = headers.get("retry-after", "")
    if not text:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(text))
    return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now_s())


def read_events(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON of each event of a stream, up to `[DONE]` or the stream's end.

    Raises `_FailedError` for an error in the stream.
    """
    rest, mark = b"", codecs.BOM_UTF8
    while content := response.read1(65_536):
        *lines, rest = (rest + content).replace(b"\r", b"\n").split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise _FailedError(Failed("unreadable", "a line of the endpoint's stream is too long"))
        for line in lines:
            name, _, value = line.removeprefix(mark).partition(b":")
            mark = b""  # a stream may begin with one
            if name != b"data":
                continue
            if value.strip() == b"[DONE]":
                return
            yield _parse_event(value)


def _parse_event(value: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(value)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise _FailedError(Failed("unreadable", "the endpoint's stream is not JSON"))
    if event.get("error"):
        text = describe_error(value)
        code = event["error"].get("code") if isinstance(event["error"], dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            raise _FailedError(judge_status(code, f" in the stream: {text}"))
        raise _FailedError(Failed("error", f"the endpoint failed during the answer: {text}"))
    return event


def read_finish_reason(choice: Mapping[str, Any]) -> FinishReason | None:
    """Return why an answer ended. Raises `_FailedError` for an end that is none."""
    reason = choice.get("finish_reason")
    match reason:
        case None | "":
            return None
        case "length":
            return "length"
        case "stop" | "eos_token" | "stop_sequence" | "tool_calls":
            return "stop"
        case "content_filter":
            raise _FailedError(Refused(ModelError("the endpoint's content filter ended the answer")))
    # The server meant this end, as vLLM does with `abort`: to ask again would glue two answers together.
    raise _FailedError(Refused(ModelError(f"the endpoint ended the answer with {str(reason)[:100]!r}")))


def read_usage(event: Mapping[str, Any]) -> Usage | None:
    """Return the tokens that an endpoint has counted; None where it does not say."""
    usage = event.get("usage")
    if not isinstance(usage, Mapping):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else 0
    numbers = [usage.get("prompt_tokens"), cached or 0, usage.get("completion_tokens")]
    if not all(isinstance(number, int) and 0 <= number <= MAX_TOLD_TOKENS for number in numbers):
        return None
    prompt, cached, completion = (int(number) for number in numbers if number is not None)
    return Usage(prompt_tokens=prompt, cached_tokens=min(cached, prompt), completion_tokens=completion)
