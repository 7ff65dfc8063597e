"""The part of both clients that does no I/O: settings, requests and their messages, the reading of a stream, errors.

`Client` and `AsyncClient` do the I/O between these steps. They send the message that `prepare_message` returns, and
answer the questions of `read_stream`: take from the live channel, read the log, read the record.
"""

import struct
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from opentelemetry.trace import Span, SpanKind

from penstock import names
from penstock.bus.contract import Outgoing, Publisher
from penstock.bus.placement import chain_prompt
from penstock.config.addresses import Addresses
from penstock.config.settings import BatchSettings, BusSettings, PictureSettings, RecordSettings, load_settings
from penstock.errors import (
    BusUnavailable,
    DependencyMissing,
    IdConflict,
    InvalidName,
    InvalidRequest,
    ModelError,
    RequestLost,
    SettingsError,
    StreamDiverged,
    StreamError,
    StreamExpired,
    StreamTimeout,
)
from penstock.grammar.spec import from_response_format
from penstock.messages import (
    MAX_TEXTS,
    ChatMessage,
    Detail,
    EmbedOptions,
    EncodedRequest,
    EndEvent,
    FinishReason,
    GrammarSpec,
    Logprobs,
    Picture,
    PromptToken,
    Request,
    Sampling,
    Text,
    Timings,
    TokenEvent,
    ToolCall,
    Usage,
    Vectors,
    translate_validation_errors,
)
from penstock.names import START_HASH, Pipeline, PriorityClass, parse_event_id, roll_hash
from penstock.ops.lag import LagWatch
from penstock.record.log import RequestStatus, parse_event
from penstock.sealing import seal_message, use_tenant_keys
from penstock.telemetry import tracing
from penstock.telemetry.timeline import PLACEMENT_ATTRIBUTE

Event = TokenEvent | EndEvent

MAX_NOTED_PLACES = 10_000
"""The number of newest requests for which a client remembers the place of the message."""
LOST_WORDS = "its message was deleted from its topic before a worker read it"
MIN_KEPT_HASHES = 1024
"""Rolling hashes that a reader keeps at least, to recognise events it has seen. Bounds the memory of a long stream."""
MAX_SILENCE_S = 15.0
"""The longest time without a live event after which the log is read, as live events may be lost."""
FIRST_SILENCE_S = 1.0
"""The first such time. Each next one is twice as long, so that a stream that waits for its worker costs little."""
MAX_PART_BYTES = 2**20
"""The most bytes of the texts of one request of several; a longer text is alone. Workers take turns at less."""
MAX_LOG_READ_EVENTS = 128
"""Events that one read of a log returns at most."""


class RequestFields(TypedDict, total=False):
    """The fields of `Request` and `Sampling` that a caller may give besides the prompt.

    A type checker needs them written out; a test checks that the list is complete.
    """

    messages: Sequence[ChatMessage | dict[str, Any]] | None
    token_ids: Sequence[int] | None
    chat_template_kwargs: Mapping[str, Any] | None
    texts: Sequence[Text] | None
    embed: EmbedOptions | Mapping[str, Any] | None
    id: str | None
    model: str | None
    tenant: str
    weight: float
    session: str | None
    retain_s: float | None
    priority_class: PriorityClass
    deadline: float | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | None
    prompt_logprobs: int | None
    seed: int | None
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    max_tokens: int
    fit_context: Literal[True] | None
    min_tokens: int | None
    special_text: Literal[True] | None
    tell_stop: Literal[True] | None
    ignore_eos: bool
    grammar: GrammarSpec | None
    response_format: Mapping[str, Any] | None
    """The form of the answer, as in OpenAI's chat completions; it stands for a `grammar`. The workers check it."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    id: str
    text: str
    token_ids: list[int]
    """The ids of the answer's tokens; empty if an endpoint answered, which sends only text."""
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: list[Logprobs]
    """One for each of `token_ids`; empty unless asked for."""
    prompt_tokens: list[PromptToken] = field(default_factory=list)
    """The prompt's tokens with their log probabilities; empty unless asked for."""
    token_texts: list[str] = field(default_factory=list)
    """The text that each of `token_ids` added. The end event adds the rest of the text, which was held back."""
    stop: str | None = None
    """The stop string that ended it, if asked for."""
    vectors: Vectors | None = None
    """The vectors or scores, if the request has `texts`."""


class BaseClient(ABC):
    """The state of both clients before they open a connection; `Client` explains the arguments."""

    def __init__(
        self,
        addresses: Addresses | None = None,
        *,
        kafka: str = "",
        redis: str = "",
        pipeline: str = "",
        bus: BusSettings | None = None,
        record: RecordSettings | None = None,
        tenant: str = "",
        topics: Literal["shared", "own"] = "shared",
    ) -> None:
        given = {"kafka": kafka, "stream_url": redis, "pipeline": pipeline}
        given = {name: value for name, value in given.items() if value}
        self._addresses = load_settings(Addresses, **given) if addresses is None else addresses.model_copy(update=given)
        self._bus_settings = bus or load_settings(BusSettings)
        self._record_settings = record or load_settings(RecordSettings)
        self._pipeline = Pipeline(self._addresses.pipeline)
        use_tenant_keys(self._addresses.tenant_keys)
        self._defaults = RequestFields(tenant=tenant) if tenant else RequestFields()
        self._own_topics = topics == "own"
        if self._own_topics and not self._addresses.kafka:
            raise SettingsError("topics of a tenant's own need Kafka as the bus: set PENSTOCK_KAFKA")
        self._watch = LagWatch(self._addresses, self._bus_settings)
        self._publisher: Publisher | None = None
        self._places: dict[str, str] = {}
        """The places of the messages of the newest requests, by request id."""
        self.is_let_in = False
        """Redis has answered: from now on a refusal may be over soon, and streams wait for that."""
        self._open_logs()

    def _note_place(self, request_id: str, place: str) -> None:
        self._places[request_id] = place
        if len(self._places) > MAX_NOTED_PLACES:
            self._places.pop(next(iter(self._places)), None)

    def _is_gone(self, request_id: str) -> bool:
        place = self._places.get(request_id)
        return place is not None and bool(self._watch.find_gone([place]))

    def _store_picture(self, file: bytes | str | PathLike[str], detail: Detail | None) -> Picture:
        """Store a picture's file, in a thread without an event loop; `Client.put_picture` explains it."""
        try:
            from penstock.objects import ObjectStorage  # its library is none of the base installation
        except ImportError as error:
            raise DependencyMissing(f"pictures need pip install 'penstock[images]' ({error})") from None
        from penstock.pictures.decoding import measure_picture
        from penstock.pictures.store import PictureStore

        data = file if isinstance(file, bytes) else Path(file).read_bytes()
        settings = load_settings(PictureSettings)
        if len(data) > settings.max_bytes:
            raise InvalidRequest(
                f"a picture of {len(data):,} bytes; a request's may have {settings.max_bytes:,} together"
            )
        width, height = measure_picture(data, settings.max_pixels, detail)
        with (
            closing(ObjectStorage.open(load_settings(BatchSettings).store_url)) as objects,
            closing(PictureStore(self._addresses, objects, settings, self._record_settings)) as store,
        ):
            digest = store.put(data, self._defaults.get("tenant", "default"))
        return Picture(digest=digest, num_bytes=len(data), width=width, height=height, detail=detail)

    @abstractmethod
    def _open_logs(self) -> None:
        """Make what reads and writes Redis. The constructor calls it, once; it connects to nothing."""


def make_request(prompt: str | None, fields: RequestFields) -> Request:
    """Return a valid request made of a caller's arguments. Raises `InvalidRequest`."""
    sampling: dict[str, Any] = {}
    body: dict[str, Any] = {"prompt": prompt, "sampling": sampling}
    try:
        for name, value in fields.items():
            if name != "response_format":
                part = sampling if name in Sampling.model_fields else body
                part[name] = list(cast("Iterable[int]", value)) if name == "token_ids" and value else _to_plain(value)
    except TypeError as error:
        raise InvalidRequest(str(error)) from None
    if (grammar := from_response_format(fields.get("response_format"))) is not None:
        if fields.get("grammar") is not None:
            raise InvalidRequest("only one of response_format and grammar can be given")
        sampling["grammar"] = grammar
    body["id"] = uuid.uuid4().hex if body.get("id") is None else body["id"]
    with translate_validation_errors():
        return Request.model_validate(body)


def _to_plain(value: Any) -> Any:
    """Return an argument as a value that JSON has, or as a part of a message. Raises `TypeError`."""
    match value:
        case None | str() | int() | float() | ChatMessage() | Picture() | ToolCall() | GrammarSpec() | EmbedOptions():
            return value
        case Mapping():
            return {key: _to_plain(one) for key, one in value.items()}
        case Iterable():
            return [_to_plain(one) for one in value]
    raise TypeError(f"a request cannot carry {type(value).__name__}")


def check_conflict(request_id: str, body: str, status: RequestStatus | None) -> None:
    """Raise `IdConflict` if the id's record names a body with another hash than `body`."""
    if status is not None and status.body not in ("", body):
        raise IdConflict(f"{request_id} was used for another request")


def prepare_message(
    pipeline: Pipeline,
    encoded: EncodedRequest,
    since_s: float | None = None,
    key: str = "",
    card: str = "",
    *,
    own_topics: bool = False,
) -> tuple[Span, Outgoing]:
    """Return the message to publish and its span, which the caller ends.

    The span begins now, or at `since_s` (seconds since the epoch). `key` is the id of the API key that it came with,
    `card` what gateways know of its stream.
    """
    request, priority_class = encoded.request, encoded.request.priority_class or "interactive"
    context = tracing.with_request(pipeline, request.id)
    span = tracing.start_span(
        "request", context, since_s, SpanKind.PRODUCER, id=request.id, priority_class=priority_class
    )
    headers = {
        names.VERSION_HEADER: str(request.v),
        names.TENANT_HEADER: request.tenant,
        names.CLASS_HEADER: priority_class,
    }
    headers[names.FORM_HEADER] = names.CANONICAL_FORM
    if request.deadline is not None:
        headers[names.DEADLINE_HEADER] = str(request.deadline)
    if key:
        headers[names.KEY_HEADER] = key
    if card:
        headers[names.CARD_HEADER] = card
    headers |= tracing.inject_headers(tracing.with_span(span))
    topic = pipeline.request_topic(priority_class)
    topic = names.add_tenant(topic, request.tenant) if own_topics else topic
    explain = partial(span.set_attribute, PLACEMENT_ATTRIBUTE) if span.is_recording() else None
    value = seal_message("request", request.tenant, request.id, encoded.value, {"v": request.v})
    return span, Outgoing(topic, value, request.id, headers, chain_prompt(request, explain))


@contextmanager
def end_span(span: Span) -> Iterator[None]:
    """End the span when the context ends."""
    try:
        yield
    finally:
        span.end()


def raise_on_error(events: Sequence[Event]) -> Iterator[Event]:
    """Yield the events. Raises the error of an `EndEvent` that has one, instead of yielding it."""
    for event in events:
        if isinstance(event, EndEvent) and event.error is not None:
            raise event.error.to_exception()
        yield event


def split_texts(texts: Sequence[Text]) -> list[list[int]]:
    """Return the places of texts in groups, each for one request: of like length, the longest first, at most
    `MAX_TEXTS` and `MAX_PART_BYTES` together, where a token id counts as four. A longer text is alone.

    Raises `InvalidRequest` for what is not a sequence of texts.
    """
    if isinstance(texts, str) or not all(isinstance(text, str | list) for text in texts):
        raise InvalidRequest("texts must be a sequence of strings, or of lists of token ids")
    sizes = [len(text.encode(errors="replace")) if isinstance(text, str) else 4 * len(text) for text in texts]
    parts, num_bytes = list[list[int]](), 0
    for place in sorted(range(len(texts)), key=sizes.__getitem__, reverse=True):
        if not parts or len(parts[-1]) == MAX_TEXTS or num_bytes + sizes[place] > MAX_PART_BYTES:
            parts.append([])
            num_bytes = 0
        parts[-1].append(place)
        num_bytes += sizes[place]
    return parts


def join_vectors(places: Sequence[int], answers: Sequence[Answer], *, is_score: bool = False) -> list[bytes]:
    """Return the numbers of each text, as float32, little-endian, in the order of the texts; one number where it
    `is_score`. The answers have the texts at `places`, one after the other. Raises `ModelError` where that is not so.
    """
    found = [one for answer in answers if answer.vectors is not None for one in _unpack_vectors(answer.vectors)]
    size = 4 if is_score else next(map(len, found), 0)
    if len(found) != len(places) or any(len(one) != size for one in found):
        what = "score" if is_score else "vector"
        raise ModelError(f"the answers do not have one {what} of each text: do all workers serve the same model?")
    return [one for _, one in sorted(zip(places, found, strict=True), key=lambda pair: pair[0])]


def _unpack_vectors(vectors: Vectors) -> list[bytes]:
    try:
        return vectors.split_floats()
    except ValueError:
        raise ModelError("an answer's vectors are not base64") from None


def unpack_floats(numbers: bytes) -> tuple[float, ...]:
    """Return numbers that are float32, little-endian."""
    return struct.unpack(f"<{len(numbers) // 4}f", numbers)


def build_answer(request_id: str, events: Sequence[Event]) -> Answer:
    """Return the answer that consists of a whole stream's events, the `EndEvent` included."""
    *tokens, end = events
    assert isinstance(end, EndEvent), "a stream that raised nothing has its end"
    return Answer(
        id=request_id,
        text="".join(event.text for event in events),
        token_ids=[event.token for event in tokens if isinstance(event, TokenEvent) and end.pieces is None],
        finish_reason=end.finish_reason,
        usage=end.usage,
        timings=end.timings,
        logprobs=[event.logprobs for event in tokens if isinstance(event, TokenEvent) and event.logprobs is not None],
        prompt_tokens=next((event.prompt_tokens or [] for event in tokens if isinstance(event, TokenEvent)), []),
        token_texts=[event.text for event in tokens],
        stop=end.stop,
        vectors=end.vectors,
    )


class StreamDeadline:
    """A reader's times: it gives up after `timeout_s` seconds without an event, and reads the log after a silence."""

    def __init__(self, request_id: str, timeout_s: float, max_silence_s: float) -> None:
        self._request_id, self._timeout_s, self._max_silence_s = request_id, timeout_s, max_silence_s
        self._silent_since = time.monotonic()
        self.renew()

    def renew(self) -> None:
        """Count from now: there was a new event."""
        self._ends_at = time.monotonic() + self._timeout_s
        self.shorten_silence()

    def shorten_silence(self) -> None:
        """Make the next silence short."""
        self._silence_s = min(FIRST_SILENCE_S, self._max_silence_s)

    def begin_silence(self) -> float:
        """Return how many seconds to wait for a live event before the log is read."""
        self._silent_since = time.monotonic()
        return min(self._silence_s, self._ends_at - self._silent_since)

    def end_silence(self) -> None:
        """Make the next silence twice as long, if this one was not ended early: by a new subscription, or a stop."""
        if time.monotonic() > self._silent_since + self._silence_s / 2:
            self._silence_s = min(2 * self._silence_s, self._max_silence_s)

    @property
    def is_over(self) -> bool:
        """Whether the time has passed."""
        return time.monotonic() >= self._ends_at

    def check(self) -> None:
        """Raise `StreamTimeout` if the time has passed."""
        if self.is_over:
            raise StreamTimeout(f"nothing new about {self._request_id} for {self._timeout_s:g} s")


class StreamReader:
    """One reader's position in one stream: at the beginning, or after the event id it saw last.

    It merges a live channel, which may drop events, with the log, and returns every event once, in order. It computes
    each token's rolling hash again, so a stream that is not the one read so far raises `StreamDiverged`.
    """

    def __init__(self, after: str | None = None) -> None:
        self.is_behind = True
        """An event is missing, or may be: read the log after position `log_after` and call `feed_log`."""
        self.is_log_missing = False
        """The last read of the log lacked events that this reader has seen: the log expired, or is being remade."""
        self.has_read_event = False
        """This reader has read an event: a log that is missing now was lost with its server, it did not expire."""
        self.end: EndEvent | None = None
        self.request_id = ""
        """The request whose stream is read, by which sealed events are opened; `read_stream` sets it."""
        self._first, self._hashes = 0, list[str]()
        if after is not None:
            self._first, rolled = parse_event_id(after)
            self._hashes.append(rolled)

    @property
    def num_tokens(self) -> int:
        """The number of tokens before this reader's position, which is the position of the next one."""
        return self._first + len(self._hashes)

    @property
    def log_after(self) -> int:
        """The position to read the log after. The last token seen comes again: its hash proves the log is the same."""
        return max(self.num_tokens - 2, -1)

    def feed_payload(self, payload: bytes) -> list[Event]:
        """Return the event of a message of the live channel, as `feed_live`. An unreadable message is a gap."""
        try:
            event = parse_event(payload, self.request_id)
            place = self._locate_event(event)
        except StreamError:
            self.is_behind = True
            return []
        return self._feed_located(event, *place)

    def feed_live(self, event: Event) -> list[Event]:
        """Return the live event if it is the next one, else nothing. A gap before it sets `is_behind`."""
        return self._feed_located(event, *self._locate_event(event))

    def _feed_located(self, event: Event, position: int, rolled: str) -> list[Event]:
        self.has_read_event = True
        if position > self.num_tokens:
            self.is_behind = True
            return []
        return self._accept_event(event, position, rolled)

    def feed_log(self, events: Iterable[Event]) -> list[Event]:
        """Return those events that are new, of a read of the log after position `log_after`."""
        accepted: list[Event] = []
        num_events = 0
        for event in events:
            num_events += 1
            position, rolled = self._locate_event(event)
            if position > self.num_tokens:
                raise StreamDiverged(f"the log has a hole after token {self.num_tokens - 1}")
            accepted += self._accept_event(event, position, rolled)
        self.is_behind = False
        self.is_log_missing = num_events == 0 and self.num_tokens > 0
        self.has_read_event = self.has_read_event or num_events > 0
        return accepted

    def check_record(self, status: RequestStatus | None) -> None:
        """Raise `StreamDiverged` if a record, read after the log, says that the stream ended before the tokens seen."""
        # A read of the log behind the tokens seen finds nothing then, now and later.
        if status is not None and status.stage == "end" and status.num_tokens < self.num_tokens:
            raise StreamDiverged(f"the stream ended after {status.num_tokens} of the {self.num_tokens} tokens seen")

    def _locate_event(self, event: Event) -> tuple[int, str]:
        """Return the number of tokens before the event, and a token's rolling hash ("" for the end)."""
        try:
            return (event.num_events, "") if isinstance(event, EndEvent) else parse_event_id(event.id)
        except InvalidName as error:
            raise StreamError(f"the stream has an event without a valid id: {error}") from None

    def _accept_event(self, event: Event, position: int, rolled: str) -> list[Event]:
        """Return the event if it is the next one, nothing if it was seen. `position` is at most the next one."""
        if self.end is not None:
            return []
        num_tokens = self.num_tokens
        if isinstance(event, EndEvent):
            if position < num_tokens:
                raise StreamDiverged(f"the stream ended after {position} of the {num_tokens} tokens seen")
            self.end = event
            return [event]
        if position < num_tokens:
            if position >= self._first and rolled != self._hashes[position - self._first]:
                raise StreamDiverged(f"token {position} is another one than was seen")
            return []
        if rolled != roll_hash(self._hashes[-1] if self._hashes else START_HASH, event.token):
            raise StreamDiverged(f"token {position} does not follow what was seen")
        self._hashes.append(rolled)
        if len(self._hashes) == 2 * MIN_KEPT_HASHES:
            del self._hashes[:MIN_KEPT_HASHES]
            self._first += MIN_KEPT_HASHES
        return [event]


@dataclass(frozen=True)
class TakeLive:
    """Wait for live events, at most for `timeout_s`. The reply is their JSON, and whether others may be missing."""

    timeout_s: float


@dataclass(frozen=True)
class ReadLog:
    """Read the log after a token's position. The reply is its events, at most `MAX_LOG_READ_EVENTS`."""

    after: int


@dataclass(frozen=True)
class ReadStatus:
    """Read the request's record. The reply is a `RequestStatus`, or None."""


@dataclass(frozen=True)
class IsGone:
    """Find out whether no message of the request waits any more. The reply is False where its place is not known."""


StreamQuestion = TakeLive | ReadLog | ReadStatus | IsGone
StreamStep = StreamQuestion | list[Event]
"""A question of `read_stream` to its caller, or the next events of the stream."""


def read_stream(
    request_id: str,
    reader: StreamReader,
    timeout_s: float,
    body: str = "",
    *,
    begins_with_log: bool = False,
    max_silence_s: float = MAX_SILENCE_S,
) -> Generator[StreamStep, Any, None]:
    """Read a stream: yield questions, to which the caller sends the replies, and the events that follow from them.

    The caller listens to the live channel from the first `TakeLive` on. Its reply says that events may be missing, so
    the log is read then. The log is read again at a gap, and after each silence; silences grow up to `max_silence_s`.
    With `begins_with_log` the log is read first, so that nobody listens to a stream that has ended. If Redis is away,
    the caller throws `BusUnavailable` into the generator, which repeats the read after the next silence.

    Events come in lists of those that came together; an empty list comes after each wait without any. An end with an
    error is an event as any other. With `body`, the hash of a request's body, `IdConflict` is raised before the first
    event if the id's record names another one. Raises otherwise as `Client.stream`.
    """
    reader.request_id, is_body_checked = request_id, not body
    events: list[Event] = []  # kept until the body is checked
    deadline = StreamDeadline(request_id, timeout_s, max_silence_s)
    is_listening = not begins_with_log
    while reader.end is None or events:
        payloads, has_more = (yield TakeLive(deadline.begin_silence())) if is_listening else ([], True)
        events += [event for payload in payloads for event in reader.feed_payload(payload)]
        if not payloads:
            deadline.end_silence()
        has_more = has_more or reader.is_behind
        while events or has_more:
            if events:
                try:
                    is_body_checked = is_body_checked or (yield from _check_body(request_id, body))
                except BusUnavailable:
                    break
                yield events
                deadline.renew()
            events, has_more = (yield from _read_log(request_id, reader, deadline)) if has_more else ([], False)
        if reader.end is None or events:
            if deadline.is_over and not reader.has_read_event:
                yield from _raise_if_lost(request_id)
            deadline.check()
        if is_listening and not payloads:
            yield []
        is_listening = True


def _raise_if_lost(request_id: str) -> Generator[StreamStep, Any, None]:
    """Raise `RequestLost` if a request's message is gone, and no worker has seen it."""
    with suppress(BusUnavailable):
        if (yield IsGone()):
            status: RequestStatus | None = yield ReadStatus()
            if status is None or status.stage == "new":
                raise RequestLost(f"{request_id}: {LOST_WORDS}")


def _check_body(request_id: str, body: str) -> Generator[StreamStep, Any, bool]:
    """Return whether the request's record names the body. Raises as `check_conflict` if it names another one."""
    status: RequestStatus | None = yield ReadStatus()
    check_conflict(request_id, body, status)
    return status is not None and status.body != ""


def _read_log(
    request_id: str, reader: StreamReader, deadline: StreamDeadline
) -> Generator[StreamStep, Any, tuple[list[Event], bool]]:
    """Return the next new events of the log, and whether it may have more. An outage counts as none.

    A missing log is final unless the request has a record. A log that was met here was lost with its server and may be
    remade, so only the last attempt gives it up.
    """
    is_last = deadline.is_over
    try:
        read: list[Event] = yield ReadLog(reader.log_after)
        events = reader.feed_log(read)
        if reader.is_log_missing:
            status: RequestStatus | None = yield ReadStatus()
            reader.check_record(status)
            if status is None and (is_last or not reader.has_read_event):
                raise StreamExpired(f"the log of {request_id} is gone")
    except BusUnavailable:
        deadline.shorten_silence()
        return [], False
    return events, len(read) == MAX_LOG_READ_EVENTS and reader.end is None
