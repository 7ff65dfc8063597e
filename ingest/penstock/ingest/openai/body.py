"""The common parts of all endpoints' bodies: exact types, no unknown fields, and errors that name the field.

There are three kinds of fields: those with an effect; those that can be ignored without harm, which are no fields of
these models but in one list (`penstock.ingest.ignored`); and those that would change the answer if they had an effect
(`Refused`, `allow_only`). For the last, any value except "off" is an error.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError, from_json
from pydantic_core.core_schema import ValidationInfo

from penstock.client.core import RequestFields
from penstock.errors import InvalidRequest, reword_validation
from penstock.grammar.spec import from_guided_fields, from_response_format, from_structured_outputs
from penstock.grammar.tools import ConstrainedCalls
from penstock.ingest.errors import ApiError
from penstock.ingest.ignored import strip_ignored_fields
from penstock.messages import MIN_REPETITION_PENALTY, GrammarSpec, TokenId

MAX_CHOICES = 128
"""The most choices of one request: its prompts times its `n`."""
MAX_SEED = 2**63
GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
GrammarReader = Callable[[], GrammarSpec | None]
UNSUPPORTED_CODE = "unsupported_parameter"
NOT_IN_PATHS = ("function-", "constrained-", "tagged-", "literal[", "list[", "dict[", "union[", "Named")
"""Beginnings of what pydantic puts into the location of an error, but no client has sent."""


def unsupported_value(param: str, what: str) -> ApiError:
    """Return the error for a parameter that is understood but not supported."""
    return ApiError(400, f"Unsupported value of '{param}': {what}", param=param, code=UNSUPPORTED_CODE)


def invalid_value(param: str, what: str) -> ApiError:
    """Return the error for a parameter with a value that it cannot have."""
    return ApiError(400, f"Invalid value for '{param}': {what}", param=param, code="invalid_value")


def _make_check(*allowed: Any, instead: str) -> Callable[[Any], Any]:
    names = " or ".join(json.dumps(value) for value in allowed)
    advice = instead or (f"Send {names}, or leave it out." if allowed else "Leave it out.")

    def check(value: Any) -> Any:
        if value is None or value in allowed:
            return None
        # The error names no parameter: pydantic knows the whole path.
        raise PydanticCustomError(UNSUPPORTED_CODE, "this server does not support it. {advice}", {"advice": advice})

    return check


def allow_only(*allowed: Any, instead: str = "") -> Any:
    """Return the type of a field that allows only values without an effect. `instead`: what others can do."""
    schema: dict[str, Any] = {"enum": [None, *allowed], "description": "Nothing else is supported."}
    return Annotated[Any, AfterValidator(_make_check(*allowed, instead=instead)), WithJsonSchema(schema)]


Refused = Annotated[
    Any,
    AfterValidator(_make_check([], {}, False, instead="Leave it out.")),
    WithJsonSchema({"enum": [None, False, [], {}], "description": "Not supported."}),
]
"""The type of a field that asks for something that is not supported."""
TokenLimit = Annotated[int, Field(ge=1, lt=2**31)]
NumTopLogprobs = Annotated[int, Field(ge=0, le=20)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Metadata = Annotated[dict[str, Annotated[str, StringConstraints(max_length=512)]], Field(max_length=16)]
ShortText = Annotated[str, StringConstraints(max_length=256)]
NonEmptyText = Annotated[str, Field(min_length=1)]
# A long list ends at its first error: each one takes kilobytes, and the gateway's time.
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Inputs = Annotated[list[NonEmptyText], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def _parse_token_ids(biases: object) -> object:
    """Return the keys of a JSON object as numbers, where they are."""
    if not isinstance(biases, dict):
        return biases
    return {int(key) if _TOKEN_ID.fullmatch(key) else key: bias for key, bias in biases.items()}


LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_parse_token_ids),
    Field(max_length=1024, json_schema_extra={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}),
]


_DETAIL = {"enum": ["auto", "low", "high"]}
IMAGE_SCHEMAS: Sequence[dict[str, Any]] = (
    {
        "type": "object",
        "required": ["type", "image_url"],
        "properties": {
            "type": {"const": "image_url"},
            "image_url": {
                "type": "object",
                "required": ["url"],
                "properties": {"url": {"type": "string"}, "detail": _DETAIL},
            },
        },
    },
    {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"const": "input_image"},
            "image_url": {"type": "string"},
            "file_id": {"type": "string"},
            "detail": _DETAIL,
        },
    },
)
"""Parts with an image, for models that see."""


def make_text_schema(*kinds: str, others: Sequence[dict[str, Any]] = ()) -> WithJsonSchema:
    """Return the JSON schema of a message's content: text, or parts of these types or with one of the other schemas."""
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": list(kinds)}, "text": {"type": "string"}},
    }
    items = {"anyOf": [part, *others]} if others else part
    return WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": items}]})


class StrictModel(BaseModel):
    """Exact types, no unknown fields, finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    """How to stream."""

    include_usage: bool | None = None
    """Send the usage before the end."""
    include_obfuscation: allow_only(False) = None  # type: ignore[valid-type]


def _check_is_streamed(options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
    if options is not None and not info.data.get("stream"):
        raise ValueError("it is only allowed when 'stream' is true")
    return options


TRANSLATED_FIELDS = frozenset({
    "model", "seed", "top_k", "top_p", "stop", "logprobs", "prompt_logprobs", "response_format", "messages",
    "chat_template_kwargs",
})  # fmt: skip
"""Fields of bodies with the name of a request's that are not given to it as they are. All others are."""


def hash_session(key: str) -> str:
    """Return the session of a chat that a client names `key`, which may be any text, as a request may carry it."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class ModelBody(StrictModel):
    """What the bodies of all endpoints have, those of vectors and scores too."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """One of those that `/v1/models` lists."""

    @property
    def num_choices(self) -> int:
        """How many requests of the pipeline are needed."""
        return 1

    @property
    def wants_stream(self) -> bool:
        """Whether the answer is sent in pieces."""
        return False

    def hold_calls(self, template: Mapping[str, Any]) -> ConstrainedCalls | None:
        """Return what holds answers with calls, by the model's response template; None where they are free.

        Raises `InvalidRequest` if the model's calls cannot be held, and `ApiError` 400.
        """
        return None

    def find_grammar(self) -> tuple[str, GrammarSpec] | None:
        """Return the parameter that has the answer's grammar, and the grammar. Raises `ApiError` 400."""
        return None

    def dump_options(self) -> dict[str, Any]:
        """Return what the making of the answer needs of this body: all but its prompt."""
        return self.model_dump(mode="json", exclude_unset=True, exclude={"messages", "prompt", "input"})


class Body(ModelBody):
    """The fields that all endpoints have which generate text."""

    stream: bool | None = None
    """Send the answer in pieces, as server-sent events."""
    stream_options: Annotated[StreamOptions | None, AfterValidator(_check_is_streamed)] = None
    """Only with `stream`."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 takes the likeliest token."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """`flex`: run as class `batch`, with the capacity that interactive requests leave."""
    seed: Annotated[int, Field(ge=-MAX_SEED, lt=MAX_SEED)] | None = None
    """The same seed and prompt give the same tokens."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Sample from this many likeliest tokens; 0 or -1: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens whose probability is at least this fraction of the likeliest one's."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=100)] | None = None
    """Divides the scores of tokens that have occurred; 1: off."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """The answer does not end by itself before this many tokens, and a stop string within them is not looked for."""
    ignore_eos: bool | None = None
    """Generate up to the limit even if the model ends before; for load tests."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    """End at the first of these tokens."""
    prompt_cache_key: ShortText | None = None
    """Requests with the same one find the worker that has their KV, as with `x-session-affinity`. Empty: none."""

    # What vLLM and SGLang have besides, and their clients send with its default.
    use_beam_search: Refused = None
    length_penalty: allow_only(1) = None  # type: ignore[valid-type]
    skip_special_tokens: allow_only(True) = None  # type: ignore[valid-type]
    spaces_between_special_tokens: allow_only(True) = None  # type: ignore[valid-type]
    include_stop_str_in_output: Refused = None
    no_stop_trim: Refused = None
    truncate_prompt_tokens: allow_only(instead="Shorten the prompt.") = None  # type: ignore[valid-type]
    allowed_token_ids: allow_only(instead="Use 'logit_bias' or 'guided_choice'.") = None  # type: ignore[valid-type]
    bad_words: allow_only([], instead="Use 'logit_bias'.") = None  # type: ignore[valid-type]
    logits_processors: Refused = None
    priority: allow_only(0, instead="Use 'service_tier'.") = None  # type: ignore[valid-type]
    return_token_ids: Refused = None
    return_tokens_as_token_ids: Refused = None
    return_hidden_states: Refused = None
    cache_salt: allow_only(instead="Tenants share no cached prompts.") = None  # type: ignore[valid-type]
    kv_transfer_params: Refused = None
    vllm_xargs: Refused = None
    lora_path: Refused = None
    session_params: Refused = None
    regex: allow_only(instead="Use 'guided_regex'.") = None  # type: ignore[valid-type]
    ebnf: allow_only(instead="Use 'guided_grammar'.") = None  # type: ignore[valid-type]

    structured_outputs: dict[str, Any] | None = None
    """One of `json` (a schema), `json_object`, `regex`, `choice` and `grammar` (Lark): what the answer must match."""
    guided_json: dict[str, Any] | str | None = None
    """A JSON schema that the answer must match."""
    guided_regex: str | None = None
    """A regular expression that the answer must match."""
    guided_choice: list[str] | None = None
    """The answer is one of these."""
    guided_grammar: str | None = None
    """A grammar in Lark's form that the answer must match."""

    @property
    def wants_stream(self) -> bool:
        """Whether the answer is sent in pieces."""
        return bool(self.stream)

    def grammar_readers(self) -> dict[str, GrammarReader]:
        """Return what reads the grammar of each parameter that is given. They raise `InvalidRequest`."""
        given: dict[str, GrammarReader] = {}
        if self.structured_outputs is not None:
            given["structured_outputs"] = partial(from_structured_outputs, self.structured_outputs)
        for name in GUIDED_FIELDS:
            if (value := getattr(self, name)) is not None:
                given[name] = partial(from_guided_fields, {name: value})
        return given

    def find_grammar(self) -> tuple[str, GrammarSpec] | None:
        """Return the parameter that has the answer's grammar, and the grammar. Raises `ApiError` 400."""
        found = []
        for param, read in self.grammar_readers().items():
            try:
                spec = read()
            except InvalidRequest as error:
                raise ApiError(
                    400, f"Invalid value for '{param}': {error}", param=param, code="invalid_value"
                ) from None
            if spec is not None:
                found.append((param, spec))
        if len(found) > 1:
            names = ", ".join(f"'{param}'" for param, _ in found)
            raise ApiError(400, f"Only one of {names} can be given.", param=found[0][0], code="invalid_value")
        if found and self.ignore_eos:
            message = f"'ignore_eos' cannot be used with '{found[0][0]}': after the grammar's end nothing follows"
            raise ApiError(400, message, param="ignore_eos", code="invalid_value")
        return found[0] if found else None

    def request_fields(self) -> RequestFields:
        """Return the fields that all its requests have in common."""
        fields = RequestFields(
            model=self.model, priority_class="batch" if self.service_tier == "flex" else "interactive"
        )
        names = (type(self).model_fields.keys() & RequestFields.__annotations__.keys()) - TRANSLATED_FIELDS
        fields |= cast(RequestFields, {name: value for name in names if (value := getattr(self, name)) is not None})
        if (grammar := self.find_grammar()) is not None:
            fields["grammar"] = grammar[1]
        if self.prompt_cache_key:
            fields["session"] = hash_session(self.prompt_cache_key)
        if self.top_k is not None:
            fields["top_k"] = max(0, self.top_k)
        if self.top_p == 0:
            fields["top_k"] = 1
        elif self.top_p is not None:
            fields["top_p"] = self.top_p
        return fields

    def choice_seed(self, choice: int) -> RequestFields:
        """Return the seed of one of several choices. The first has the given one, so it answers as if it were alone."""
        return RequestFields() if self.seed is None else RequestFields(seed=(self.seed + choice) % MAX_SEED)


class CompletionsBody(Body):
    """The fields that chat and plain completions share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """How many answers to generate."""
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    """The answer ends before the first of these."""
    max_tokens: TokenLimit | None = None
    """The most tokens of each answer."""
    logit_bias: LogitBias | None = None
    """Added to the scores of these tokens."""
    response_format: dict[str, Any] | None = None
    """The form of the answer: `text`, `json_object`, or `json_schema` with its schema."""

    def grammar_readers(self) -> dict[str, GrammarReader]:
        """Return what reads the grammar of each parameter that is given. They raise `InvalidRequest`."""
        if self.response_format is None:
            return super().grammar_readers()
        return {"response_format": partial(from_response_format, self.response_format)} | super().grammar_readers()

    def request_fields(self) -> RequestFields:
        """Return the fields that all its requests have in common."""
        fields = super().request_fields()
        if self.stop is not None:
            fields["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        return fields


B = TypeVar("B", bound=BaseModel)


def read_json(raw: bytes) -> Any:
    """Return a body's JSON. Raises `ApiError` 400."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        if str(error).startswith("recursion limit exceeded"):
            message = "The body is nested too deeply: it may have 200 levels."
            raise ApiError(400, message, code="nested_too_deeply") from None
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None


def parse_body(kind: type[B], raw: bytes | Mapping[str, Any], path: str = "") -> B:
    """Return a body of type `kind`, without what the endpoint at this path ignores.

    `raw` is its JSON, or what that says. Raises `ApiError` 400 that names the parameter.
    """
    fields = read_json(raw) if isinstance(raw, bytes) else raw
    stripped, _ = strip_ignored_fields(path, fields, kind.model_fields)
    try:
        return kind.model_validate(stripped)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False, include_context=False, include_input=False)) from None


def validation_error(lines: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for an invalid value, of which pydantic has one or several lines."""
    # A parameter that is not supported says more than one that is missing, which it may stand for.
    line = next((one for one in lines if one["type"] == UNSUPPORTED_CODE), lines[0])
    found = [one for one in lines if one["loc"][:1] == line["loc"][:1]]
    if line["type"].endswith("_type"):
        # A value of none of several types has a line for each. If it is of one, another line says more.
        telling = (one for one in found if not one["type"].endswith("_type"))
        line = next(telling, max(found, key=_get_depth))
    param = _name_param(line)
    words = dict.fromkeys(reword_validation(one["msg"]) for one in found if _name_param(one) == param)
    if line["type"].endswith("_type"):
        return _make_error(line["type"], param, " or ".join(words).replace(" or must be", " or"))
    return _make_error(line["type"], param, reword_validation(line["msg"]))


def _name_param(line: Mapping[str, Any]) -> str:
    parts = map(str, line["loc"])
    return ".".join(part for part in parts if part not in {"str", "int"} and not part.startswith(NOT_IN_PATHS))


def _get_depth(line: Mapping[str, Any]) -> int:
    return _name_param(line).count(".")


def _make_error(kind: str, param: str, message: str) -> ApiError:
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
    if param:
        message = f"Invalid value for '{param}': {message}"
    return ApiError(400, message, param=param or None, code="invalid_value")
