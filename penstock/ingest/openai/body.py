"""What the bodies of all endpoints share: exact types, no unknown fields, and clear words about what is refused.

Three kinds of fields: those that do something, those that are harmless to ignore, and those that would change the
answer if they did anything (`Refused`, `Only`): any value of these but "off" is an error that names the field.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from penstock.client.core import RequestFields
from penstock.ingest.errors import ApiError
from penstock.messages import MAX_LOGPROBS, TokenId

MAX_CHOICES = 128
"""Of one request: its prompts times its `n`."""
MAX_SEED = 2**63
NO_TOKEN_LIMIT = 2**31 - 1
"""Tokens of an answer: more than any context has."""


UNSUPPORTED_CODE = "unsupported_parameter"


def unsupported_value(param: str, what: str) -> ApiError:
    """That a parameter is understood, and cannot be had."""
    return ApiError(400, f"Unsupported value of '{param}': {what}", param=param, code=UNSUPPORTED_CODE)


def _make_check(*allowed: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is None or value in allowed:
            return None
        raise PydanticCustomError(UNSUPPORTED_CODE, "this server does not support it.")  # pydantic knows the whole path

    return check


def allow_only(*allowed: Any) -> Any:
    """A field that may say nothing but what is so anyway."""
    schema: dict[str, Any] = {"enum": [None, *allowed], "description": "Nothing else is supported."}
    return Annotated[Any, AfterValidator(_make_check(*allowed)), WithJsonSchema(schema)]


Refused = Annotated[
    Any,
    AfterValidator(_make_check([], {}, False)),
    WithJsonSchema({"enum": [None, False, [], {}], "description": "Not supported."}),
]
"""A field that asks for something that is not there."""
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Metadata = Annotated[dict[str, Annotated[str, StringConstraints(max_length=512)]], Field(max_length=16)]
ShortText = Annotated[str, StringConstraints(max_length=256)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024, json_schema_extra={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
]


def make_text_schema(*kinds: str) -> WithJsonSchema:
    """What a message's content may be: text, or parts of these types."""
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": list(kinds)}, "text": {"type": "string"}},
    }
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": part}]})


class StrictModel(BaseModel):
    """Exact types, no unknown fields, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    """How to stream."""

    include_usage: bool | None = None
    """Send the usage before the end."""
    continuous_usage_stats: bool | None = None
    """Accepted, as load tools ask for it; the usage comes once."""
    include_obfuscation: allow_only(False) = None  # type: ignore[valid-type]


def _check_is_streamed(options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
    if options is not None and not info.data.get("stream"):
        raise ValueError("it is only allowed when 'stream' is true")
    return options


CheckedStreamOptions = Annotated[StreamOptions | None, AfterValidator(_check_is_streamed)]


class Body(StrictModel):
    """The fields that all endpoints have."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """One of those that `/v1/models` lists."""
    stream: bool | None = None
    """Send the answer in pieces, as server-sent events."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 takes the likeliest token."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """`flex`: fill what others leave, at leisure (class `batch`)."""
    metadata: Metadata | None = None
    """Accepted, and given back by `/v1/responses`."""
    user: ShortText | None = None
    """Accepted; does nothing."""
    safety_identifier: ShortText | None = None
    """Accepted; does nothing."""
    prompt_cache_key: ShortText | None = None
    """Accepted; does nothing: the header `x-session-affinity` says what belongs together."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Accepted; does nothing."""
    seed: Annotated[int, Field(ge=-MAX_SEED, lt=MAX_SEED)] | None = None
    """Same seed, same prompt, same tokens."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Draw from so many likeliest tokens; 0 or -1: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Draw from tokens at least this share as likely as the likeliest."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """Divides the scores of the tokens there are already; 1: off."""
    ignore_eos: bool | None = None
    """Go on to the most tokens whatever the model says: for load tests."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    """End with the first of these tokens."""

    @property
    def num_choices(self) -> int:
        """How many requests of the pipeline it takes."""
        return 1

    def request_fields(self) -> RequestFields:
        """What all of its requests have in common."""
        fields = RequestFields(model=self.model, klass="batch" if self.service_tier == "flex" else "interactive")
        for name in ("temperature", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if self.top_k is not None:
            fields["top_k"] = max(0, self.top_k)
        if self.top_p == 0:
            fields["top_k"] = 1
        elif self.top_p is not None:
            fields["top_p"] = self.top_p
        return fields

    def set_default_limit(self, fields: RequestFields) -> None:
        """Let the answer fill the context, where no limit was given; with log probabilities, as far as they go."""
        if "max_tokens" not in fields:
            logprobs = fields.get("logprobs")
            fields["max_tokens"] = NO_TOKEN_LIMIT if logprobs is None else MAX_LOGPROBS // (1 + logprobs)
            fields["fit_context"] = True

    def choice_seed(self, choice: int) -> RequestFields:
        """The seed of one of several choices. The first one's is the one given: it answers as if it were alone."""
        return RequestFields() if self.seed is None else RequestFields(seed=(self.seed + choice) % MAX_SEED)


class CompletionsBody(Body):
    """The fields that chat and plain completions share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """How many answers."""
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    """The answer ends before the first of these."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The most tokens of each answer."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    """Added to the scores of these tokens."""
    stream_options: CheckedStreamOptions = None
    """Only with `stream`."""

    def request_fields(self) -> RequestFields:
        """What all of its requests have in common."""
        fields = super().request_fields()
        for name in ("presence_penalty", "frequency_penalty", "logit_bias", "max_tokens"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if self.stop is not None:
            fields["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        return fields


B = TypeVar("B", bound=BaseModel)


def parse_body(kind: type[B], raw: bytes | Mapping[str, Any]) -> B:
    """A body of `kind` from its JSON. Raises `ApiError` 400 that names the parameter."""
    try:
        return kind.model_validate_json(raw if isinstance(raw, bytes) else json.dumps(raw))
    except ValidationError as error:
        line = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise validation_error(line["type"], line["loc"], line["msg"]) from None


def validation_error(kind: str, where: Sequence[str | int], message: str) -> ApiError:
    """The answer to a value that cannot be: pydantic's type of error, the place and what it says of it."""
    param = ".".join(str(part) for part in where if not str(part).startswith(("function-", "constrained-")))
    match kind:
        case "json_invalid":
            return ApiError(400, f"The body is not valid JSON: {message}", code="invalid_json")
        case "extra_forbidden":
            message = f"Unrecognized request argument supplied: {param}"
            return ApiError(400, message, param=param, code="unknown_parameter")
        case "missing":
            message = f"Missing required parameter: '{param}'."
            return ApiError(400, message, param=param, code="missing_required_parameter")
        case "model_type" | "model_attributes_type" if not param:
            message = "The body must be a JSON object, sent as application/json."
            return ApiError(400, message, code="invalid_value")
        case "unsupported_parameter":
            return unsupported_value(param, message)
        case "value_error":
            message = message.removeprefix("Value error, ")  # pydantic's words before ours
    if param:
        message = f"Invalid value for '{param}': {message}"
    return ApiError(400, message, param=param or None, code="invalid_value")
