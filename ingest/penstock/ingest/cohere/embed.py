"""`/v2/embed`, and what Cohere's endpoints share."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field
from pydantic_core import PydanticCustomError

from penstock.client.core import Answer, unpack_floats
from penstock.ingest.errors import ApiError
from penstock.ingest.openai.body import UNSUPPORTED_CODE, NonEmptyText, ShortText, allow_only
from penstock.ingest.openai.embeddings import Dimensions, encode_base64, list_floats
from penstock.ingest.openai.endpoint import ApiEndpoint, B, StreamMeta, SubmitArgs
from penstock.ingest.openai.texts import MAX_INPUTS, Texts, TextsBody, TextsEndpoint, count_tokens
from penstock.messages import EmbedOptions

_PROMPTS: Mapping[str, Sequence[str]] = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "search_document"),
}
"""The names under which checkpoints have the prompts for types of input; others have their own name."""


def _check_types(kinds: list[str]) -> list[str]:
    if found := {"int8", "uint8"}.intersection(kinds):
        raise PydanticCustomError(
            UNSUPPORTED_CODE,
            "{found} needs ranges that were calibrated. Send 'float', 'base64', 'binary' or 'ubinary'.",
            {"found": " and ".join(sorted(found))},
        )
    return kinds


EmbeddingType = Literal["float", "base64", "binary", "ubinary", "int8", "uint8"]


class CohereEmbedBody(TextsBody):
    """A request to `/v2/embed`."""

    text_fields = ("texts",)

    texts: Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_INPUTS)]
    input_type: ShortText | None = None
    """What the texts are for: `search_query`, `search_document`, or the name of one of the model's prompts."""
    embedding_types: (
        Annotated[list[EmbeddingType], Field(min_length=1, max_length=6), AfterValidator(_check_types)] | None
    ) = None
    """`float`, `base64`, `binary` and `ubinary`."""
    output_dimension: Dimensions | None = None
    """Only so many leading numbers of each vector, where the model was trained for that."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """Where texts are cut that are too long for the model; `NONE`: they are refused. Default: `END`."""
    images: allow_only([]) = None  # type: ignore[valid-type]
    inputs: allow_only([], instead="Send 'texts'.") = None  # type: ignore[valid-type]
    max_tokens: allow_only(instead="Use 'truncate'.") = None  # type: ignore[valid-type]

    def list_texts(self) -> list[Texts]:
        """Return its texts, and what is computed of each."""
        cut: Literal["start", "end"] = "start" if self.truncate == "START" else "end"
        truncate = None if self.truncate == "NONE" else cut
        return [Texts(self.texts, EmbedOptions(dimensions=self.output_dimension, truncate=truncate, in_result=False))]


class CohereErrorBody(BaseModel):
    """The body of every error at Cohere's paths."""

    message: str
    code: str | None = None
    param: str | None = None


class CohereEndpoint(ApiEndpoint[B]):
    """An endpoint of Cohere's API."""

    error_model = CohereErrorBody

    def make_error_body(self, error: ApiError) -> CohereErrorBody:
        """Return the body of an error."""
        return CohereErrorBody(message=str(error), code=error.code, param=error.param)


def make_cohere_meta(path: str, answers: Sequence[Answer], **units: int) -> dict[str, Any]:
    """Return what an answer tells of itself: how many tokens it took, and units as Cohere bills them."""
    tokens = {"input_tokens": count_tokens(answers)}
    return {"api_version": {"version": path.split("/")[1][1:]}, "billed_units": units or tokens, "tokens": tokens}


Numbers = list[list[float]]
Bits = list[list[int]]


class EmbeddingsByType(BaseModel):
    """The vectors of all texts, in the order of the texts."""

    float: Numbers | None = None
    base64: list[str] | None = None
    binary: Bits | None = None
    ubinary: Bits | None = None


class CohereEmbeddings(BaseModel):
    """The answer of `/v2/embed`."""

    id: str
    embeddings: EmbeddingsByType
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


class CohereEmbedEndpoint(CohereEndpoint[CohereEmbedBody], TextsEndpoint[CohereEmbedBody]):
    """`/v2/embed`."""

    path = "/v2/embed"
    id_prefix = "embed-"
    prompt_field = "texts"
    body_model = CohereEmbedBody
    answer_model = CohereEmbeddings
    task = "embed"

    def choose_prompt(self, body: CohereEmbedBody, requests: Sequence[SubmitArgs], known: Collection[str]) -> None:
        """Have requests name the prompt of the type of input. Where the model has none, texts of a search have no
        prompt, and others the model's default.
        """
        kind = body.input_type or ""
        missing = "" if kind in _PROMPTS else None
        prompt = next((name for name in _PROMPTS.get(kind, (kind,)) if name in known), missing)
        for args in requests:
            assert isinstance(args["embed"], EmbedOptions), "as `make_requests` has made it"
            args["embed"] = args["embed"].model_copy(update={"prompt": prompt})

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> CohereEmbeddings:
        """Return the whole answer."""
        numbers = self.join_numbers(meta, answers)
        kinds = meta.options.get("embedding_types") or ["float"]
        made: dict[str, Any] = {kind: [_ENCODERS[kind](one) for one in numbers] for kind in kinds}
        return CohereEmbeddings.model_construct(
            id=meta.id,
            embeddings=EmbeddingsByType.model_construct(None, **made),
            meta=make_cohere_meta(self.path, answers),
        )


def _pack_bits(numbers: bytes) -> list[int]:
    """Return the signs of numbers, eight in each byte: a bit is 1 for a positive one."""
    bits = "".join("1" if one > 0 else "0" for one in unpack_floats(numbers))
    return [int(bits[first : first + 8].ljust(8, "0"), 2) for first in range(0, len(bits), 8)]


def _pack_signed_bits(numbers: bytes) -> list[int]:
    return [one - 128 for one in _pack_bits(numbers)]


_ENCODERS: Mapping[str, Callable[[bytes], Any]] = {
    "float": list_floats, "base64": encode_base64, "binary": _pack_signed_bits, "ubinary": _pack_bits,
}  # fmt: skip
COHERE_EMBED = CohereEmbedEndpoint()
