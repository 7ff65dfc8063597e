"""All messages on the wire: JSON, versioned, validated on the way in and out.

`Request` → requests topic; `Job` → jobs topic; `Result` → results topic. `TokenEvent` and `EndEvent` are the entries of
the token log in Redis and the payloads of its pub/sub channel. `ErrorInfo` is part of the last three.
"""

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from penstock.errors import (
    REQUEST_ERRORS,
    InternalError,
    InvalidRequest,
    RequestError,
    RequestTooLarge,
    UnsupportedVersion,
)
from penstock.names import MAX_ID_CHARS, PriorityClass, event_id, is_request_id

VERSION: Literal[1] = 1
MAX_REQUEST_BYTES = 8 * 2**20
"""A larger request is answered with `request_too_large`. Topics take twice this, so that the answer can be given."""
MAX_ERROR_CHARS = 1000
"""An error may quote what it was given; its message is cut here, so that it always fits into a topic."""

Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Weight = Annotated[float, Field(ge=0.01, le=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
RequestId = Annotated[str, StringConstraints(pattern=rf"^[A-Za-z0-9][A-Za-z0-9._:-]{{0,{MAX_ID_CHARS - 1}}}$")]
TokenBytes = list[Annotated[int, Field(ge=0, le=255)]]
MAX_ERRORS = 100
MAX_LENIENT_BYTES = 2**20
"""Of a message that is not quite JSON, and is parsed once more for its id."""
DEFAULT_MAX_TOKENS = 256
"""Of a request that names no limit. As many are expected of one that may fill the context, until some were counted."""
MAX_LOGPROBS = 2**16
"""Of one answer, chosen and likeliest ones together: its result must fit into a topic."""
MAX_TOKEN_BYTES = 100
"""Of one token's text beside its log probability, for the same reason; a longer one is left out."""
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
FinishReason = Literal["stop", "length", "cancelled", "error"]


class Wire(BaseModel):
    """What all wire models share: exact types, no unknown fields, finite numbers, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)

    def encode(self) -> bytes:
        """The JSON that goes on the wire."""
        return self.model_dump_json(by_alias=True, exclude_none=True).encode()


class ErrorInfo(Wire):
    """A typed error: `code` is one of `penstock.errors.REQUEST_ERRORS`, `message` is for people."""

    code: str
    message: str

    @classmethod
    def from_error(cls, error: RequestError) -> Self:
        """The wire form of an error."""
        return cls(code=error.code, message=str(error)[:MAX_ERROR_CHARS])

    def to_exception(self) -> RequestError:
        """The exception this stands for."""
        return REQUEST_ERRORS.get(self.code, InternalError)(self.message)


class ChatMessage(Wire):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class Sampling(Wire):
    """How tokens are chosen. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    In this order: bias, penalties, temperature, top-k, top-p, min-p.
    """

    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens at least this share as likely as the likeliest one."""
    presence_penalty: Penalty = 0.0
    """Taken from the score of each token the answer has already."""
    frequency_penalty: Penalty = 0.0
    """Taken from the score of a token as often as the answer has it."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=100)
    """The scores of the tokens in prompt and answer are divided by it, negative ones multiplied; 1 is off."""
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(default={}, max_length=1024)
    """Added to the scores of these tokens."""
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """Tell each token's log probability, and those of this many likeliest tokens, by the model alone: before bias,
    penalties, temperature and filters."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Same seed, same prompt, same tokens. Without one it is derived from the request's id."""
    stop: list[Annotated[str, StringConstraints(min_length=1, max_length=256)]] = Field(default=[], max_length=16)
    """The answer ends before the first of these strings."""
    stop_token_ids: list[TokenId] = Field(default=[], max_length=64)
    """The answer ends with the first of these tokens."""
    max_tokens: int = Field(default=DEFAULT_MAX_TOKENS, ge=1, lt=2**31)
    # Not on the wire where it is not set: readers that do not know it refuse the message.
    fit_context: Literal[True] | None = None
    """Where the context has no room for `max_tokens` after the prompt, the answer ends with it, and is not refused."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever the model says: for load tests."""

    @property
    def min_new_tokens(self) -> int:
        """New tokens for which there has to be room after the prompt."""
        return 1 if self.fit_context else self.max_tokens

    @model_validator(mode="after")
    def _logprobs_fit(self) -> Self:
        if self.logprobs is not None and self.max_tokens * (1 + self.logprobs) > MAX_LOGPROBS:
            raise ValueError(f"max_tokens times one more than logprobs may be {MAX_LOGPROBS:,}")
        return self


class Request(Wire):
    """A prompt, as text, chat messages or token ids, and how to answer it."""

    v: Literal[1] = VERSION
    id: RequestId
    """Chosen by the producer; the key of everything that follows. Also the Kafka key."""
    model: str | None = Field(default=None, max_length=256)
    """The model expected; any other is refused. Without it, the pipeline's."""
    prompt: str | None = None
    # Spelling out each of millions of errors would stall all threads of a worker: the first one says enough.
    messages: list[ChatMessage] | None = Field(default=None, fail_fast=True)
    token_ids: list[TokenId] | None = Field(default=None, fail_fast=True)
    sampling: Sampling = Sampling()
    klass: PriorityClass | None = Field(default=None, alias="class")
    """Must agree with the topic's class when given."""
    tenant: Tenant = "default"
    weight: Weight = 1.0
    """The tenant's share where tenants compete: with 3 it gets three times the tokens of one with 1."""
    session: RequestId | None = None
    """Requests of one session, such as the turns of a chat, should find the worker that holds their KV."""
    deadline: float | None = Field(default=None, gt=0)
    """Seconds since the epoch; an answer not complete by then ends with `deadline_exceeded`."""

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        given = [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of prompt, messages and token_ids must be given, not {given or 'none'}")
        if not getattr(self, given[0]):
            raise ValueError(f"{given[0]} is empty")
        return self


class Usage(Wire):
    """Token counts: what was worked on for the request.

    `prompt_tokens` are all of the prompt where any token was said. Of a request that ended before that they are those
    computed or found until then, so 0 where it ended while it waited. `cached_tokens` is the part of them whose KV was
    found, not computed.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Timings(Wire):
    """The stages of a request's life, each stamped once, in seconds since the epoch (0: not reached)."""

    published: float = 0.0
    prefill_started: float = 0.0
    first_token: float = 0.0
    handed_off: float = 0.0
    decode_started: float = 0.0
    finished: float = 0.0


class Job(Wire):
    """The reference a prefill worker leaves for decode. Carries token ids and the last block's key, never tensors.

    With `error` set the request ended in prefill, and decode only makes that its result.
    """

    v: Literal[1] = VERSION
    id: RequestId
    job: str
    """Names this hand-off; the first one claimed is bound to the request and settles its result."""
    token_ids: list[TokenId] = Field(default=[], fail_fast=True)
    """The prompt."""
    sampling: Sampling = Sampling()
    seed: int = 0
    tenant: Tenant = "default"
    weight: Weight = 1.0
    klass: PriorityClass = Field(default="interactive", alias="class")
    deadline: float | None = None
    fingerprint: str = ""
    """Of the model whose KV was stored."""
    last_block: str = ""
    """Hex key of the prompt's last KV block: a chain over all tokens before it."""
    cached_tokens: int = 0
    timings: Timings = Timings()
    error: ErrorInfo | None = None


class TokenLogprob(Wire):
    """A token that could have been chosen."""

    token: TokenId
    logprob: float = Field(le=0)
    text: str | None = None
    """The token by itself, as text."""
    bytes: TokenBytes | None = None
    """What it is made of, where it is no whole characters."""


class Logprobs(Wire):
    """What the model alone said when a token was chosen: natural logarithms of probabilities."""

    logprob: float = Field(le=0)
    """Of the token that was chosen."""
    text: str | None = None
    """That token by itself, as text. (Its event's text is what it adds to the answer: nothing, or more.)"""
    bytes: TokenBytes | None = None
    """What it is made of, where it is no whole characters."""
    top: list[TokenLogprob] = []
    """The likeliest tokens, as many as were asked for, in falling order."""


class Result(Wire):
    """The one visible end of a request."""

    v: Literal[1] = VERSION
    id: RequestId
    tenant: Tenant = "default"
    klass: PriorityClass = Field(default="interactive", alias="class")
    model: str = ""
    finish_reason: FinishReason
    text: str = ""
    token_ids: list[TokenId] = Field(default=[], fail_fast=True)
    logprobs: list[Logprobs] | None = None
    """One for each of `token_ids`, where the request asks for them."""
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: ErrorInfo | None = None
    truncated: Literal[True] | None = None
    """`text` is only the beginning, as no topic takes all of it; `token_ids` and the stream's log have the rest. There
    are no `logprobs` then."""


class TokenEvent(Wire):
    """One token of a stream."""

    id: str
    """Event id: position and rolling hash (`names.event_id`)."""
    token: TokenId
    text: str
    """What this token adds; empty while a character or a stop string is incomplete."""
    logprobs: Logprobs | None = None
    """Where the request asks for them."""

    @classmethod
    def at_position(
        cls, position: int, rolling_hash: str, token: int, text: str, logprobs: Logprobs | None = None
    ) -> Self:
        """The token at `position`, with the rolling hash up to and including it."""
        return cls(id=event_id(position, rolling_hash), token=token, text=text, logprobs=logprobs)


class EndEvent(Wire):
    """The end of a stream, after `usage.completion_tokens` tokens."""

    finish_reason: FinishReason
    text: str = ""
    """Text that was held back when the stream was cut short."""
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: ErrorInfo | None = None


M = TypeVar("M", bound=Wire)


def decode_message(kind: type[M], value: bytes) -> M:
    """A message of `kind` from its JSON. Raises `RequestTooLarge`, `UnsupportedVersion` or `InvalidRequest`."""
    if len(value) > MAX_REQUEST_BYTES and kind is Request:
        raise RequestTooLarge(f"{len(value):,} bytes; a request may have {MAX_REQUEST_BYTES:,}")
    try:
        message = kind.model_validate_json(value, by_alias=True, by_name=False)
    except ValidationError as error:
        if error.error_count() > MAX_ERRORS:  # spelling out millions of them would stall the worker
            raise InvalidRequest(f"{error.error_count():,} errors") from None
        lines = [dict(line) for line in error.errors(include_url=False, include_input=False)]
        if any(line["loc"] == ("v",) and line["type"] == "literal_error" for line in lines):
            raise UnsupportedVersion(f"this build reads message version {VERSION}") from None
        raise InvalidRequest("; ".join(map(_describe_validation_error, lines[:5]))) from None
    if "v" in kind.model_fields and "v" not in message.model_fields_set:
        raise InvalidRequest(f"v: the message does not say its version ({VERSION})")
    return message


def _describe_validation_error(line: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in line["loc"])
    return f"{where}: {line['msg']}" if where else str(line["msg"])


def extract_request_id(value: bytes, key: str | None) -> str | None:
    """The request id of a message that may not be valid otherwise: its JSON's `id`, else its Kafka key, else None.

    Of one that is larger than a request may be, the key comes first, and nothing is parsed if that is an id.
    """
    if len(value) > MAX_REQUEST_BYTES and key is not None and is_request_id(key):
        return key
    for candidate in (_parse_request_id(value), key):
        if isinstance(candidate, str) and is_request_id(candidate):
            return candidate
    return None


class _MessageNames(BaseModel):
    """What a message says its id is, beside anything else."""

    id: Any = None
    job: Any = None


def extract_job_name(value: bytes) -> str | None:
    """The name of a job that may not be valid otherwise, if it says one."""
    try:
        job = _MessageNames.model_validate_json(value).job
    except ValidationError:
        return None
    return job if isinstance(job, str) else None


def _parse_request_id(value: bytes) -> object:
    try:
        return _MessageNames.model_validate_json(value).id  # makes no objects of all the rest
    except ValidationError:
        pass
    if len(value) > MAX_LENIENT_BYTES:
        return None
    try:
        body = json.loads(value)  # knows halves of characters, and other encodings
    except (ValueError, RecursionError):
        return None
    return body.get("id") if isinstance(body, dict) else None


def estimate_open_answer_tokens(mean_tokens: float | None) -> int:
    """Return how long an answer without a limit of its own is expected to get.

    That is as long as answers lately were, or `DEFAULT_MAX_TOKENS` where that is not known yet (None).
    """
    return DEFAULT_MAX_TOKENS if mean_tokens is None else round(mean_tokens)


def now_s() -> float:
    """Seconds since the epoch, as all messages give time."""
    return time.time()
