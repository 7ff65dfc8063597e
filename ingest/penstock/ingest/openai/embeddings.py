"""`/v1/embeddings`, as OpenAI has it."""

import base64
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from penstock.client.core import Answer, unpack_floats
from penstock.ingest.openai.body import Inputs, NonEmptyText, ShortText, TokenIds
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.openai.texts import MAX_INPUTS, Texts, TextsBody, TextsEndpoint, count_tokens
from penstock.messages import EmbedOptions, Text
from penstock.names import PriorityClass

Dimensions = Annotated[int, Field(ge=1, lt=2**16)]


class EmbeddingsBody(TextsBody):
    """A request to `/v1/embeddings`."""

    input: NonEmptyText | TokenIds | Annotated[Inputs, Field(min_length=1, max_length=MAX_INPUTS)]
    """A text, or several; where the gateway takes them, each as this model's token ids."""
    dimensions: Dimensions | None = None
    """Only so many leading numbers of each vector, where the model was trained for that."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: the numbers as float32, little-endian."""
    prompt_name: ShortText | None = None
    """Which of the model's prompts is put before each text, as `/v1/models` lists them; empty: none."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """`flex`: run as class `batch`, with the capacity that interactive requests leave."""

    def list_texts(self) -> list[Texts]:
        """Return its texts, and what is computed of each."""
        options = EmbedOptions(prompt=self.prompt_name, dimensions=self.dimensions, in_result=False)
        is_one = isinstance(self.input, str) or isinstance(self.input[0], int)
        texts: Sequence[Text] = [self.input] if is_one else self.input  # type: ignore[list-item, assignment]
        return [Texts(texts, options)]

    @property
    def priority_class(self) -> PriorityClass:
        """The class of its requests."""
        return "batch" if self.service_tier == "flex" else "interactive"


class EmbeddingsUsage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or base64."""


class Embeddings(BaseModel):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class EmbeddingsEndpoint(TextsEndpoint[EmbeddingsBody]):
    """`/v1/embeddings`."""

    path = "/v1/embeddings"
    id_prefix = "embd-"
    prompt_field = "input"
    body_model = EmbeddingsBody
    answer_model = Embeddings
    task = "embed"

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> Embeddings:
        """Return the whole answer."""
        encode = encode_base64 if meta.options.get("encoding_format") == "base64" else list_floats
        # Without validation, which takes longer than all else for thousands of vectors.
        data = [
            Embedding.model_construct(index=index, embedding=encode(numbers))
            for index, numbers in enumerate(self.join_numbers(meta, answers))
        ]
        return Embeddings.model_construct(data=data, model=meta.model, usage=make_usage(answers))


def make_usage(answers: Sequence[Answer]) -> EmbeddingsUsage:
    """Return how many tokens the texts have."""
    num_tokens = count_tokens(answers)
    return EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


def encode_base64(numbers: bytes) -> str:
    """Return numbers as SDKs take them apart."""
    return base64.b64encode(numbers).decode()


def list_floats(numbers: bytes) -> list[float]:
    """Return numbers that are float32 as a list."""
    return [*unpack_floats(numbers)]


EMBEDDINGS = EmbeddingsEndpoint()
