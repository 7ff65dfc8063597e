"""All messages on the wire: versioned JSON, validated when it is written and read.

`Request` goes to the requests topic, `Job` to jobs, `Result` to results. `TokenEvent` and `EndEvent` are the entries of
the token log in Redis and the payloads of its pub/sub channel. `Job`, `Result` and `EndEvent` may have an `ErrorInfo`.
"""

import base64
import codecs
import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from json.encoder import encode_basestring
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from penstock.errors import (
    REQUEST_ERRORS,
    ContentErased,
    InternalError,
    InvalidRequest,
    RequestError,
    RequestTooLarge,
    UnsupportedVersion,
    reword_validation,
)
from penstock.names import (
    CANONICAL_FORM,
    FORM_HEADER,
    MAX_ID_CHARS,
    MAX_RETENTION_S,
    PriorityClass,
    event_id,
    is_request_id,
)
from penstock.sealing import (
    has_tenant_keys,
    is_sealed,
    mask_digest,
    open_message,
    read_clear_part,
    read_envelope,
    seal_message,
)

VERSION: Literal[1] = 1
MAX_REQUEST_BYTES = 8 * 2**20
"""A larger request is answered with `request_too_large`. Topics accept twice this, so that the request arrives."""
MAX_ERROR_CHARS = 1000
"""Longer messages of errors, which may quote their input, are cut, so that they always fit into a topic."""

Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Weight = Annotated[float, Field(ge=0.01, le=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = str | Annotated[list[TokenId], Field(fail_fast=True)]
"""A text, or the token ids that the model reads in its place."""
RequestId = Annotated[str, StringConstraints(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._:-]{{0,{MAX_ID_CHARS - 1}}}$")]
TokenBytes = list[Annotated[int, Field(ge=0, le=255)]]
# Sorted, as the order says nothing: equal requests are to have one form.
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
    AfterValidator(lambda bias: dict(sorted(bias.items()))),
]
MAX_VALIDATION_ERRORS = 100
"""The most validation errors of a message that are listed. If there are more, only their number is reported."""
MAX_LENIENT_BYTES = 2**20
"""A message that is not valid JSON is parsed a second time for its id, if it is not larger than this."""
DEFAULT_MAX_TOKENS = 256
"""The limit of a request that names none, and the first estimate for answers that may fill the context."""
MAX_LOGPROBS = 2**16
"""The most log probabilities in one answer, chosen and likeliest tokens together: its result must fit into a topic."""
MAX_TOKEN_BYTES = 100
"""The longest text of a token beside its log probability; a longer one is left out, as results must fit in a topic."""
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
MAX_TEXTS = 64
"""The most texts of one request for vectors. A request costs a few milliseconds, a short text about as much."""
MAX_VECTOR_FLOATS = 2**20
"""The most numbers in one answer: as base64 they take two thirds of what a topic accepts."""
MAX_SOURCE_BYTES = 256 * 1024
"""The largest schema, regular expression, grammar or list of choices."""
GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "choice", "tools"]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MIN_REPETITION_PENALTY = 0.01
"""As far from 1 as the largest. Scores that are divided by much less are infinite, and all equal."""
FinishReason = Literal["stop", "length", "cancelled", "error"]


class Wire(BaseModel):
    """The base of all wire models: exact types, no unknown fields, finite numbers, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)

    def encode(self) -> bytes:
        """Return the JSON that goes on the wire."""
        return self.model_dump_json(by_alias=True, exclude_none=True).encode()


def replace_surrogates(text: str) -> str:
    """Return the text with half surrogate pairs replaced: JSON may have them, and UTF-8 cannot write them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ErrorInfo(Wire):
    """A typed error: `code` is a key of `penstock.errors.REQUEST_ERRORS`, `message` is for people."""

    code: str
    message: str

    @classmethod
    def from_error(cls, error: RequestError) -> Self:
        """Return the wire form of an error."""
        return cls(code=error.code, message=replace_surrogates(str(error)[:MAX_ERROR_CHARS]))

    def to_exception(self) -> RequestError:
        """Return the exception that this error stands for."""
        return REQUEST_ERRORS.get(self.code, InternalError)(self.message)


class FunctionCall(Wire):
    """A function that a model calls."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    arguments: str
    """As JSON."""


class ToolCall(Wire):
    """A call in an assistant's turn."""

    id: Annotated[str, StringConstraints(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    def describe(self) -> dict[str, Any]:
        """Return the call as chat templates have it."""
        arguments: Any = self.function.arguments
        with suppress(ValueError):
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


Detail = Literal["low", "high"]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""In hex."""


class Picture(Wire):
    """A picture in a turn. Its file lies in the store of pictures (`penstock.pictures.store`), under its digest."""

    digest: Sha256
    """Of the file."""
    num_bytes: int = Field(default=0, ge=0)
    """The length of the file; 0: not told, as of the next two."""
    width: int = Field(default=0, ge=0)
    """In pixels, of the picture as a model sees it: turned as its EXIF says, and smaller where its detail is low."""
    height: int = Field(default=0, ge=0)
    detail: Detail | None = None
    data: str | None = None
    """The file in base64, of a producer without access to the store."""


Content = str | Annotated[list[str | Picture], Field(min_length=1, fail_fast=True)]
"""A turn's content is a text, or a list of texts and pictures in their order."""


def join_contents(first: Content, second: Content) -> Content:
    """Return two contents as one, with an empty line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_list_parts(first), "\n\n", *_list_parts(second)]


def _list_parts(content: Content) -> list[str | Picture]:
    return [content] if isinstance(content, str) else content


class ChatMessage(Wire):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content
    tool_calls: list[ToolCall] | None = None
    """The calls of an assistant's turn."""
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    """The call that a turn of role `tool` has the result of."""
    reasoning_content: str | None = None
    """An assistant's reasoning before its turn; templates may leave it out."""
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Who speaks; templates may leave it out."""

    @property
    def text(self) -> str:
        """Its content without pictures."""
        content = self.content
        return content if isinstance(content, str) else "".join(part for part in content if isinstance(part, str))

    @property
    def pictures(self) -> list[Picture]:
        """The pictures in its content."""
        return [part for part in _list_parts(self.content) if isinstance(part, Picture)]

    def describe(self) -> dict[str, Any]:
        """Return the turn as chat templates have it: the arguments of calls are objects, not their JSON."""
        # No dump: that would copy the text of each turn.
        described: dict[str, Any] = {"role": self.role, "content": self.content}
        if not isinstance(self.content, str):
            described["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.content
            ]
        if self.tool_calls is not None:
            described["tool_calls"] = [call.describe() for call in self.tool_calls]
        if self.tool_call_id is not None:
            described["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:
            described["reasoning_content"] = self.reasoning_content
        if self.name is not None:
            described["name"] = self.name
        return described


class GrammarSpec(Wire):
    """A form that an answer must match. It travels in the request and in its job."""

    kind: GrammarKind
    source: str = ""
    """JSON for `json_schema` (the schema), `choice` (a list of texts) and `tools` (`penstock.grammar.tools`); empty for
    `json_object`.
    """
    engine: str = Field(default="", max_length=64)
    """In a job, the name and version of the engine that has checked it, as `llguidance 1.9.1`. In a request it says
    nothing: a prefill worker checks every grammar.
    """

    @model_validator(mode="after")
    def _source_fits(self) -> Self:
        if len(self.source.encode()) > MAX_SOURCE_BYTES:
            raise ValueError(f"a grammar may have at most {MAX_SOURCE_BYTES:,} bytes")
        if (self.kind == "json_object") != (not self.source):
            raise ValueError(f"the source of a grammar of kind {self.kind} is wrong")
        return self

    @property
    def digest(self) -> str:
        """Return the hash of what the grammar means; the engine's version is no part of it."""
        return hashlib.sha256(f"{self.kind}\n{self.source}".encode()).hexdigest()


class Sampling(Wire):
    """How tokens are chosen. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    Applied in this order: bias, penalties, grammar, temperature, top-k, top-p, min-p.
    """

    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens that are at least this share as likely as the likeliest one are chosen."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the score of each token that the answer already has."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's score once for each time that the answer has it."""
    repetition_penalty: float = Field(default=1.0, ge=MIN_REPETITION_PENALTY, le=100)
    """Divides the scores of the tokens in prompt and answer, and multiplies negative ones; 1 is off."""
    logit_bias: LogitBias = {}
    """Added to the scores of these tokens."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """The answer has each token's log probability, and those of this many likeliest tokens, by the model alone: before
    bias, penalties, temperature and filters."""
    # Not on the wire where it is not set, like `fit_context`.
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    """The first token comes with the prompt's tokens, the log probability of each, and those of this many likeliest
    ones. All of the prompt is computed: its KV is not taken from the cache."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """The same seed and prompt give the same tokens. Without a seed it is derived from the request's id."""
    stop: list[Annotated[str, StringConstraints(min_length=1, max_length=256)]] = Field(default=[], max_length=16)
    """The answer ends before the first of these strings."""
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    """The answer ends with the first of these tokens."""
    max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=1, lt=2**31)
    # Not on the wire where it is not set: readers that do not know it refuse the message.
    fit_context: Literal[True] | None = None
    """A request whose prompt and `max_tokens` exceed the context is not refused: its answer ends with the context."""
    # Not on the wire where it is not set, like `fit_context`.
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    """End-of-sequence tokens and `stop_token_ids` are not drawn before the answer has this many tokens, and a stop
    string that ends within them is not looked for. A grammar that allows nothing else ends the answer all the same."""
    special_text: Literal[True] | None = None
    """The text has the model's special tokens, and before the first token what the chat template wrote of the answer,
    so that it can be parsed by the model's response template."""
    tell_stop: Literal[True] | None = None
    """The stream's end has the stop string that ended the answer."""
    ignore_eos: bool = False
    """Generate `max_tokens` tokens even if the model ends the answer, for load tests."""
    grammar: GrammarSpec | None = None
    """The answer follows this grammar. `max_tokens` and stop strings may cut it short."""

    @property
    def min_new_tokens(self) -> int:
        """The number of new tokens that must fit into the context after the prompt."""
        return max(1, self.min_tokens or 0) if self.fit_context else self.max_tokens

    @model_validator(mode="after")
    def _min_tokens_fit(self) -> Self:
        if self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens may be at most max_tokens, here {self.max_tokens:,}")
        return self

    @model_validator(mode="after")
    def _grammar_may_end(self) -> Self:
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos and a grammar exclude each other: no token follows the grammar's end")
        return self

    @model_validator(mode="after")
    def _logprobs_fit(self) -> Self:
        if self.logprobs is not None and self.max_tokens * (1 + self.logprobs) > MAX_LOGPROBS:
            raise ValueError(f"max_tokens times one more than logprobs may be {MAX_LOGPROBS:,}")
        return self


EmbedTask = Literal["embed", "score"]
"""A model gives a vector of each text, or a score of each by a query."""


class EmbedOptions(Wire):
    """Says how a request's texts are computed: to a vector of each, or with a `query` to one score of each."""

    query: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Each text is scored by how well it answers this one, by the model's own activation."""
    prompt: Annotated[str, StringConstraints(max_length=256)] | None = None
    """The name of one of the checkpoint's prompts, which is put before each text. Default: the checkpoint's own; an
    empty name means none.
    """
    dimensions: int | None = Field(default=None, ge=1, lt=2**16)
    """Only so many leading numbers of each vector, normalised again."""
    truncate: Literal["start", "end"] | None = None
    """Where texts are cut that are too long for the model; None: they are refused."""
    in_result: Literal[False] | None = None
    """If set, the message in the results topic has no vectors: who asked reads them from the stream's end."""


class Vectors(Wire):
    """The vectors or scores of a request's texts, in the order of the texts."""

    size: int = Field(ge=1)
    """How many numbers each text has: the dimensions of its vector, or 1 for a score."""
    data: str
    """All numbers as float32, little-endian, in base64."""

    @classmethod
    def pack_floats(cls, numbers: bytes, size: int) -> Self:
        """Return the message of numbers that are float32, little-endian."""
        return cls(size=size, data=base64.b64encode(numbers).decode())

    def split_floats(self) -> list[bytes]:
        """Return the numbers of each text, as float32, little-endian. Raise `ValueError` where they are not base64."""
        numbers, step = base64.b64decode(self.data), 4 * self.size
        return [numbers[start : start + step] for start in range(0, len(numbers), step)]


class Request(Wire):
    """A prompt, as text, chat messages or token ids, and how to answer it; or texts to compute vectors of."""

    v: Literal[1] = VERSION
    id: RequestId
    """Chosen by the producer. It names everything that belongs to the request, and is the Kafka key."""
    model: str | None = Field(default=None, max_length=256)
    """The model that must answer; a pipeline that serves another one refuses the request. Default: any."""
    prompt: str | None = None
    # Fail fast: to describe each of millions of errors would stall all threads of a worker.
    messages: list[ChatMessage] | None = Field(default=None, fail_fast=True)
    token_ids: list[TokenId] | None = Field(default=None, fail_fast=True)
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template beside `messages`, such as `tools`."""
    # Not on the wire where they are not set, like `fit_context`.
    texts: list[Text] | None = Field(default=None, max_length=MAX_TEXTS, fail_fast=True)
    """Texts to compute vectors or scores of, in place of a prompt."""
    embed: EmbedOptions | None = None
    """How; only with `texts`."""
    sampling: Sampling = Sampling()
    priority_class: PriorityClass | None = Field(default=None, alias="class")
    """Must agree with the topic's class if it is given."""
    tenant: Tenant = "default"
    weight: Weight = 1.0
    """The tenant's share where tenants compete: a tenant with 3 gets three times the tokens of a tenant with 1."""
    session: RequestId | None = None
    """Requests of one session, such as the turns of a chat, are routed to the worker that has their KV, if possible."""
    # Not on the wire where it is not set, like `fit_context`.
    retain_s: float | None = Field(default=None, gt=0, le=MAX_RETENTION_S)
    """For so long behind the answer its KV outlives other KV, as another prompt will go on with it."""
    deadline: float | None = Field(default=None, gt=0)
    """Seconds since the epoch. An answer that is not complete by then ends with `deadline_exceeded`."""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        kinds = ("prompt", "messages", "token_ids", "texts")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of prompt, messages, token_ids and texts must be given, not {given or 'none'}"
            )
        if not getattr(self, given[0]):
            raise ValueError(f"{given[0]} is empty")
        if self.embed is not None and self.texts is None:
            raise ValueError("embed needs texts")
        if self.chat_template_kwargs and self.messages is None:
            raise ValueError("chat_template_kwargs needs messages")
        return self

    @property
    def seed(self) -> int:
        """The seed that was given, or one derived from the id, which is the same for every attempt."""
        if self.sampling.seed is not None:
            return self.sampling.seed
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8], "big") >> 1

    @property
    def pictures(self) -> list[Picture]:
        """The pictures in its turns."""
        return [picture for turn in self.messages or () for picture in turn.pictures]

    def encode(self) -> bytes:
        """Return its canonical JSON, as `encode_request` does."""
        return encode_request(self).value


class EncodedRequest(NamedTuple):
    """A request as it is published."""

    request: Request
    value: bytes
    """Its canonical JSON."""
    body_hash: str
    """The SHA-256 (hex) of its body, by which a request that is sent again under its id is recognised.

    Deadline, class, session, weight, retention and the engine that checked a grammar are left out: they may differ when
    it is sent again. For a tenant with a key it is an HMAC of that, by which nobody else can guess a prompt. Defaults
    are left out too, so that a worker whose version knows one more field computes the same
    hash. So is the order of the keys in `chat_template_kwargs`, and of a picture all but its digest and its detail.
    """


_BESIDE_BODY: dict[str, Any] = {
    **dict.fromkeys(("v", "priority_class", "deadline", "session", "retain_s", "weight", "chat_template_kwargs"), True),
    "sampling": {"grammar": {"engine"}},
}


def encode_request(request: Request) -> EncodedRequest:
    """Return a request's canonical JSON, and the hash of its body: both from one dump.

    The canonical JSON begins with the fields outside of the body. The body without default values follows, then
    `chat_template_kwargs`. Raises `RequestTooLarge`, or `InvalidRequest` for a value that JSON does not have.
    """
    try:
        body = _encode_body(request)
        before, after = _encode_beside_body(request)
    except ValueError as error:  # half a surrogate pair
        raise InvalidRequest(str(error)) from None
    value = b"".join((before, body, after))
    if len(value) > MAX_REQUEST_BYTES:
        raise _make_size_error(value)
    return EncodedRequest(request, value, mask_digest(request.tenant, _hash_body(request, body)))


def compute_body_hash(request: Request, value: bytes = b"", headers: Mapping[str, str] | None = None) -> str:
    """Return the hash of a request's body (`EncodedRequest.body_hash`), which came as `value` with these headers.

    If `value` is canonical, it is hashed as it is. Otherwise the request is encoded for it, so a producer that writes
    JSON in its own way gets the same hash. If one says falsely that its JSON is canonical, two messages of it are one
    body only if they agree byte by byte. What came in clear has the hash that it had before its tenant had a key.
    """
    if is_sealed(value):
        return mask_digest(request.tenant, _hash_body(request, _encode_body(request)))
    if headers is not None and headers.get(FORM_HEADER) == CANONICAL_FORM:
        before, after = _encode_beside_body(request)
        if value.startswith(before) and value.endswith(after):
            return _hash_body(request, memoryview(value)[len(before) : len(value) - len(after)])
    return _hash_body(request, _encode_body(request))


def _encode_body(request: Request) -> bytes:
    return request.model_dump_json(by_alias=True, exclude=_BESIDE_BODY, exclude_defaults=True).encode()[1:-1]


def _encode_beside_body(request: Request) -> tuple[bytes, bytes]:
    """Return the parts of a request's canonical JSON before and after the body."""
    beside = {
        "v": request.v,
        "class": request.priority_class,
        "deadline": request.deadline,
        "session": request.session,
        "retain_s": request.retain_s,
        "weight": None if request.weight == 1 else request.weight,
    }
    before = json.dumps({name: value for name, value in beside.items() if value is not None}, separators=(",", ":"))
    after = "}"
    if request.chat_template_kwargs is not None:  # in their order, which templates write into the prompt
        kwargs = json.dumps(request.chat_template_kwargs, ensure_ascii=False, separators=(",", ":"))
        after = f',"chat_template_kwargs":{kwargs}' + after
    return (before[:-1] + ",").encode(), after.encode()


def _hash_body(request: Request, body: bytes | memoryview) -> str:
    if request.pictures:
        body = _encode_body(
            request.model_copy(update={"messages": [_name_pictures(turn) for turn in request.messages or ()]})
        )
    hashed = hashlib.sha256(body)
    if request.chat_template_kwargs is not None:
        hashed.update(b"\n" + json.dumps(request.chat_template_kwargs, sort_keys=True, separators=(",", ":")).encode())
    return hashed.hexdigest()


def _name_pictures(turn: ChatMessage) -> ChatMessage:
    """Return a turn whose pictures have their digest and detail alone."""
    if isinstance(turn.content, str):
        return turn
    parts = [
        Picture(digest=part.digest, detail=part.detail) if isinstance(part, Picture) else part for part in turn.content
    ]
    return turn.model_copy(update={"content": parts})


def _make_size_error(value: bytes) -> RequestTooLarge:
    return RequestTooLarge(f"{len(value):,} bytes; a request may have {MAX_REQUEST_BYTES:,}")


class Usage(Wire):
    """Token counts of a request.

    `prompt_tokens` counts the whole prompt if the answer has any token. If the request ended before that, it counts the
    prompt tokens that were computed or found until then, which is 0 for a request that only waited. `cached_tokens`
    counts those of them whose KV was found, not computed.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Timings(Wire):
    """The times at which a request reached each stage, in seconds since the epoch (0: not reached, or left out)."""

    published: float = 0.0
    prefill_started: float = 0.0
    first_token: float = 0.0
    handed_off: float = 0.0
    decode_started: float = 0.0
    finished: float = 0.0


Side = Annotated[int, Field(ge=1, lt=2**31)]


class JobPicture(Wire):
    """A picture in the prompt of a job: what a worker has to know to go on with the prompt's KV."""

    digest: Sha256
    """Of the file."""
    detail: Detail | None = None
    name: Sha256
    """The digest of all that the picture's rows follow from."""
    first: int = Field(ge=0, lt=2**31)
    """Index of its first row among the prompt's tokens."""
    num_rows: int = Field(ge=1, lt=2**31)
    grid: tuple[Side, Side, Side] | None = None
    """How many rows it has in time, in height and in width, where positions have three axes."""

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        if self.grid is not None and math.prod(self.grid) != self.num_rows:
            raise ValueError(f"a grid of {self.grid} has not {self.num_rows} rows")
        return self


class Adapter(Wire):
    """A LoRA adapter that computes an answer in the model's place, in one version."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    digest: Sha256
    """Of its files."""


class Job(Wire):
    """The job reference of a hand-off. It carries token ids and the last block's key, never tensors.

    With `error` set the request ended in prefill, and decode only publishes that as its result.
    """

    v: Literal[1] = VERSION
    id: RequestId
    job: str
    """The id of this hand-off. The first job that is claimed is bound to the request and settles its result, unless the
    request's own message is bound by then."""
    token_ids: list[TokenId] = Field(default=[], fail_fast=True)
    """The prompt's token ids."""
    # Not on the wire where they are not set, like `fit_context`.
    texts: list[Text] | None = Field(default=None, max_length=MAX_TEXTS, fail_fast=True)
    """Texts in place of a prompt. Their vectors are in the log; if Redis has lost that, they are computed again."""
    embed: EmbedOptions | None = None
    """How the request's texts are computed, and whether its result has the vectors."""
    pictures: list[JobPicture] | None = Field(default=None, fail_fast=True)
    """The pictures in the prompt, in order."""
    adapter: Adapter | None = None
    """The adapter whose KV was stored; no other version of it goes on with the answer."""
    sampling: Sampling = Sampling()
    seed: int = 0
    tenant: Tenant = "default"
    weight: Weight = 1.0
    priority_class: PriorityClass = Field(default="interactive", alias="class")
    # Not on the wire where it is not set, like `fit_context`.
    retain_s: float | None = None
    deadline: float | None = None
    fingerprint: str = ""
    """The fingerprint of the model whose KV was stored."""
    last_block: str = ""
    """The key of the prompt's last KV block, in hex: a hash chain over all tokens before it."""
    cached_tokens: int = 0
    timings: Timings = Timings()
    error: ErrorInfo | None = None

    def encode(self) -> bytes:
        """Return the JSON that goes on the wire: sealed for a tenant with a key, an error alone if that was dropped."""
        plain = super().encode()
        if not has_tenant_keys():
            return plain
        try:
            clear = {"v": self.v, "job": self.job, "class": self.priority_class}
            return seal_message("job", self.tenant, self.id, plain, clear)
        except ContentErased as erased:
            kept = self.model_dump(include={"id", "job", "tenant", "priority_class", "timings"})
            return super(Job, Job.model_validate(kept | {"error": ErrorInfo.from_error(erased)})).encode()


class TokenLogprob(Wire):
    """A token that could have been chosen."""

    token: TokenId
    logprob: float = Field(le=0)
    text: str | None = None
    """The token by itself, as text."""
    bytes: TokenBytes | None = None
    """The token's bytes, where they are not whole characters."""


class Logprobs(Wire):
    """The probabilities that the model alone gave when a token was chosen, as natural logarithms."""

    logprob: float = Field(le=0)
    """The log probability of the chosen token."""
    text: str | None = None
    """The chosen token by itself, as text. (Its event's text is what it adds to the answer: less, or more.)"""
    bytes: TokenBytes | None = None
    """The chosen token's bytes, where they are not whole characters."""
    top: list[TokenLogprob] = []
    """The likeliest tokens, as many as the request asked for, the likeliest first."""


class PromptToken(Wire):
    """A token of the prompt, with the probabilities that the model gave for its place."""

    token: TokenId
    logprob: float | None = Field(default=None, le=0)
    """Its log probability; the first token has none."""
    text: str | None = None
    """The token by itself, as text."""
    bytes: TokenBytes | None = None
    """The token's bytes, where they are not whole characters."""
    top: list[TokenLogprob] = []
    """The likeliest tokens at its place, as many as the request asked for, the likeliest first."""


class Result(Wire):
    """The one result of a request."""

    v: Literal[1] = VERSION
    id: RequestId
    tenant: Tenant = "default"
    priority_class: PriorityClass = Field(default="interactive", alias="class")
    model: str = ""
    finish_reason: FinishReason
    text: str = ""
    token_ids: list[TokenId] = Field(default=[], fail_fast=True)
    logprobs: list[Logprobs] | None = None
    """One for each of `token_ids`, if the request asks for them."""
    prompt_tokens: list[PromptToken] | None = Field(default=None, fail_fast=True)
    """The tokens of the prompt, if the request asks for their log probabilities."""
    vectors: Vectors | None = None
    """The vectors or scores, if the request has `texts` and wants them here."""
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: ErrorInfo | None = None
    truncated: Literal[True] | None = None
    """If set, `text` is only the beginning of a text too large for the topic, and there are no `logprobs` and
    `prompt_tokens`. `token_ids` and the stream's log are complete."""

    def encode(self) -> bytes:
        """Return the JSON that goes on the wire: sealed for a tenant with a key, an error alone if that was dropped.

        What was used is in clear, for those who count it.
        """
        plain = super().encode()
        if not has_tenant_keys():
            return plain
        try:
            names = {"v", "priority_class", "model", "finish_reason", "usage", "timings"}
            return seal_message("result", self.tenant, self.id, plain, self.model_dump(include=names, by_alias=True))
        except ContentErased as erased:
            kept = self.model_dump(include={"id", "tenant", "priority_class", "model", "usage", "timings"})
            error = {"finish_reason": "error", "error": ErrorInfo.from_error(erased)}
            return super(Result, Result.model_validate(kept | error)).encode()


class TokenEvent(Wire):
    """One token of a stream."""

    id: str
    """Event id: position and rolling hash (`names.event_id`)."""
    token: TokenId
    text: str
    """The text that this token adds; empty while a character or a stop string is incomplete."""
    logprobs: Logprobs | None = None
    """Present if the request asks for them."""
    prompt_tokens: list[PromptToken] | None = Field(default=None, fail_fast=True)
    """The tokens of the prompt, at the first token of a request that asks for their log probabilities."""
    adapter: Sha256 | None = None
    """The digest of the adapter that computes the answer, at the first token, if one does."""

    @classmethod
    def at_position(
        cls, position: int, rolling_hash: str, token: int, text: str, logprobs: Logprobs | None = None
    ) -> Self:
        """Return the event of the token at `position`, with the rolling hash up to and including the token."""
        own_id = event_id(position, rolling_hash)
        if logprobs is None:  # pydantic takes a third longer for a field that is given
            return cls(id=own_id, token=token, text=text)
        return cls(id=own_id, token=token, text=text, logprobs=logprobs)

    def encode(self) -> bytes:
        """Return the JSON that goes on the wire."""
        if self.logprobs is not None or self.prompt_tokens is not None or self.adapter is not None:
            return super().encode()
        # What most events have is written by hand, in a third of pydantic's time.
        own_id, text = encode_basestring(self.id), encode_basestring(self.text)
        return f'{{"id":{own_id},"token":{self.token},"text":{text}}}'.encode()

    def check_writable(self) -> None:
        """Raise a `ValueError` if the event cannot be encoded."""
        if self.logprobs is None and self.prompt_tokens is None:
            self.text.encode()  # all that can fail, at a small part of the time
        else:
            self.encode()


class EndEvent(Wire):
    """The end of a stream, after `num_events` token events."""

    finish_reason: FinishReason
    stop: str | None = None
    """The stop string that ended the answer, if the request asks for it (`tell_stop`)."""
    text: str = ""
    """Text that was held back when the stream was cut short."""
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: ErrorInfo | None = None
    # Not on the wire where it is not set, like `fit_context`.
    pieces: int | None = None
    """The number of events before the end, if an endpoint answered. Each event is a piece of text, with a number made
    of it in place of a token id (`piece_token`). `usage` has the tokens that the endpoint counted."""

    vectors: Vectors | None = None
    """The vectors or scores, if the request has `texts`."""

    @property
    def num_events(self) -> int:
        """The number of token events before the end: of tokens, or of pieces of text."""
        return self.usage.completion_tokens if self.pieces is None else self.pieces


M = TypeVar("M", bound=Wire)
_JSON_STARTS = (b"{", b" ", b"\t", b"\n", b"\r")


def decode_message(kind: type[M], value: bytes) -> M:
    """Return a message of class `kind` from its JSON, which may be sealed.

    Raises `RequestTooLarge`, `UnsupportedVersion` or `InvalidRequest`; `ContentErased` or `TenantKeyMissing` for what
    is sealed with a key that is not here.
    """
    sealed = read_envelope(value) if is_sealed(value) else None
    value = drop_schema_prefix(value) if sealed is None else open_message(sealed, kind.__name__.lower())
    if len(value) > MAX_REQUEST_BYTES and kind is Request:
        raise _make_size_error(value)
    _refuse_prefix(value)
    with translate_validation_errors():
        message = kind.model_validate_json(value, by_alias=True, by_name=False)
    if "v" in kind.model_fields and "v" not in message.model_fields_set:
        raise InvalidRequest(f"v: the message does not say its version ({VERSION})")
    if sealed and any(getattr(message, name) != sealed[name] for name in ("id", "tenant")):
        raise InvalidRequest("a sealed message has another id or tenant in clear")
    return message


def decode_clear_part(kind: type[M], value: bytes) -> M:
    """Return a message as far as it is in clear, which takes no key. Raises as `decode_message`."""
    return decode_message(kind, read_clear_part(value) if is_sealed(value) else value)


@contextmanager
def translate_validation_errors() -> Iterator[None]:
    """Raise `UnsupportedVersion` or `InvalidRequest` instead of a `ValidationError`."""
    try:
        yield
    except ValidationError as error:
        if error.error_count() > MAX_VALIDATION_ERRORS:  # describing millions of them would stall the worker
            raise InvalidRequest(f"{error.error_count():,} errors") from None
        lines = [dict(line) for line in error.errors(include_url=False, include_input=False)]
        if any(line["loc"] == ("v",) and line["type"] == "literal_error" for line in lines):
            raise UnsupportedVersion(f"this build reads message version {VERSION}") from None
        raise InvalidRequest("; ".join(map(_describe_validation_error, lines[:5]))) from None


def drop_schema_prefix(value: bytes) -> bytes:
    """Return a value without the bytes that a schema registry's JSON serializer puts in front, where it has them.

    They are 0x00 and the schema's id of four bytes, in the wire format of Confluent's serializers.
    """
    return value[5:] if value.startswith(b"\x00") and value[5:6] in _JSON_STARTS else value


def _refuse_prefix(value: bytes) -> None:
    """Raise `InvalidRequest` if serializers of other formats have put bytes in front of the JSON."""
    if value.startswith(b"\x00"):
        raise InvalidRequest(
            "the value begins with byte 0x00 and is no JSON, as the Avro and Protobuf serializers of a schema registry "
            "write it: send JSON, with or without the 5 bytes of a registry's JSON serializer"
        )
    if value.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidRequest("the value begins with a byte order mark: send JSON in UTF-8 without it")


def _describe_validation_error(line: Mapping[str, Any]) -> str:
    where, message = ".".join(str(part) for part in line["loc"]), reword_validation(line["msg"])
    return f"{where}: {message}" if where else message


def extract_request_id(value: bytes, key: str | None) -> str | None:
    """Return the request id of a message that may otherwise be invalid: its JSON's `id`, else its Kafka key, else None.

    A message larger than a request may be is not parsed if its key is a request id.
    """
    if len(value) > MAX_REQUEST_BYTES and key is not None and is_request_id(key):
        return key
    for candidate in (_parse_request_id(value), key):
        if isinstance(candidate, str) and is_request_id(candidate):
            return candidate
    return None


class _MessageNames(BaseModel):
    """The ids of a message, whatever else it has."""

    id: Any = None
    job: Any = None


def extract_job_name(value: bytes) -> str | None:
    """Return the `job` of a message that may otherwise be invalid; None without one."""
    try:
        job = _MessageNames.model_validate_json(drop_schema_prefix(value)).job
    except ValidationError:
        return None
    return job if isinstance(job, str) else None


def _parse_request_id(value: bytes) -> object:
    value = drop_schema_prefix(value)
    try:
        return _MessageNames.model_validate_json(value).id  # creates no objects for the other fields
    except ValidationError:
        pass
    if len(value) > MAX_LENIENT_BYTES:
        return None
    try:
        body = json.loads(value)  # accepts lone surrogates and other encodings
    except (ValueError, RecursionError):
        return None
    return body.get("id") if isinstance(body, dict) else None


def estimate_open_answer_tokens(mean_tokens: float | None) -> int:
    """Return how long an answer without a limit of its own is expected to get.

    The estimate is the mean length of recent answers, or `DEFAULT_MAX_TOKENS` if that is not known yet (None).
    """
    return DEFAULT_MAX_TOKENS if mean_tokens is None else round(mean_tokens)


def now_s() -> float:
    """Return the time as all messages give it: seconds since the epoch."""
    return time.time()
