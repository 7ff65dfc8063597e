"""`/v1/rerank` and `/v2/rerank`, as Cohere has them, and `/v1/score`, as vLLM has it."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from penstock.client.core import Answer, unpack_floats
from penstock.ingest.cohere.embed import CohereEndpoint, make_cohere_meta
from penstock.ingest.openai.body import MAX_CHOICES, NonEmptyText, allow_only
from penstock.ingest.openai.embeddings import EmbeddingsUsage, make_usage
from penstock.ingest.openai.endpoint import StreamMeta
from penstock.ingest.openai.texts import MAX_INPUTS, Texts, TextsBody, TextsEndpoint
from penstock.messages import EmbedOptions

DOCS_PER_UNIT = 100
"""How many documents are one unit of search, as Cohere bills them."""


def _check_document(document: dict[str, Any]) -> dict[str, Any]:
    """Check that a document has a text. Its other fields come back with it, and are not read."""
    if not isinstance(document.get("text"), str):
        raise ValueError("a document must be a text, or an object with a 'text'")
    return document


Document = Annotated[dict[str, Any], AfterValidator(_check_document)]


class RerankBody(TextsBody):
    """A request to `/v1/rerank` or `/v2/rerank`."""

    text_fields = ("query", "documents")

    query: NonEmptyText
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    """Texts, or objects with a `text`."""
    top_n: Annotated[int, Field(ge=1)] | None = None
    """Return only so many of the best."""
    return_documents: bool | None = None
    """Return the documents with their scores."""
    rank_fields: allow_only(["text"], instead="Send each document as one text.") = None  # type: ignore[valid-type]
    max_chunks_per_doc: allow_only(1) = None  # type: ignore[valid-type]
    max_tokens_per_doc: allow_only(instead="Documents are cut at the model's length.") = None  # type: ignore[valid-type]
    relevant_spans: allow_only() = None  # type: ignore[valid-type]

    def list_texts(self) -> list[Texts]:
        """Return its texts, and what is computed of each."""
        texts = [one if isinstance(one, str) else str(one["text"]) for one in self.documents]
        return [Texts(texts, EmbedOptions(query=self.query, truncate="end", in_result=False))]

    def dump_options(self) -> dict[str, Any]:
        """Return what the making of the answer needs: the documents, if they are returned."""
        kept = self.model_dump(mode="json", include={"documents"}) if self.return_documents else {}
        return super().dump_options() | kept


class RankedDocument(BaseModel):
    """A document's score, and its place among the documents that were sent."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RankedDocuments(BaseModel):
    """The answer of `/v1/rerank` and `/v2/rerank`."""

    id: str
    model: str
    results: list[RankedDocument]
    """The best first."""
    meta: dict[str, Any]
    usage: EmbeddingsUsage
    """As other servers tell it."""


class RerankEndpoint(CohereEndpoint[RerankBody], TextsEndpoint[RerankBody]):
    """`/v1/rerank` or `/v2/rerank`."""

    id_prefix = "rerank-"
    prompt_field = "documents"
    body_model = RerankBody
    answer_model = RankedDocuments
    task = "score"

    def __init__(self, path: str) -> None:
        self.path = path

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> RankedDocuments:
        """Return the whole answer."""
        scores = [unpack_floats(one)[0] for one in self.join_numbers(meta, answers)]
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: meta.options.get("top_n")]
        documents: list[str | dict[str, Any]] | None = meta.options.get("documents")
        results = [
            RankedDocument(
                index=index,
                relevance_score=scores[index],
                document=None if documents is None else _describe_document(documents[index]),
            )
            for index in ranked
        ]
        units = -(-len(scores) // DOCS_PER_UNIT)
        about = make_cohere_meta(self.path, answers, search_units=units)
        return RankedDocuments(id=meta.id, model=meta.model, results=results, meta=about, usage=make_usage(answers))


def _describe_document(document: str | dict[str, Any]) -> dict[str, Any]:
    return {"text": document} if isinstance(document, str) else document


class ScoreBody(TextsBody):
    """A request to `/v1/score`: one text and several, or pairs of two lists."""

    text_fields = ("text_1", "text_2")

    text_1: NonEmptyText | Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_CHOICES)]
    """What the others are scored by."""
    text_2: str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
    encoding_format: allow_only("float") = None  # type: ignore[valid-type]
    truncate_prompt_tokens: allow_only(instead="Shorten the texts.") = None  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check(self) -> "ScoreBody":
        queries, texts = _list(self.text_1), _list(self.text_2)
        if len(queries) not in {1, len(texts)}:
            raise ValueError(f"'text_1' must be one text, or as many as 'text_2' has: {len(texts)}")
        return self

    def list_texts(self) -> list[Texts]:
        """Return the texts that follow each other and have the same query."""
        queries, texts = _list(self.text_1), _list(self.text_2)
        pairs = zip(queries * len(texts) if len(queries) == 1 else queries, texts, strict=True)
        return [
            Texts([text for _, text in group], EmbedOptions(query=query, in_result=False))
            for query, group in groupby(pairs, key=lambda pair: pair[0])
        ]


def _list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class Score(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(BaseModel):
    """The answer of `/v1/score`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingsUsage


class ScoreEndpoint(TextsEndpoint[ScoreBody]):
    """`/v1/score`."""

    path = "/v1/score"
    id_prefix = "score-"
    prompt_field = "text_2"
    body_model = ScoreBody
    answer_model = Scores
    task = "score"

    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> Scores:
        """Return the whole answer."""
        numbers = enumerate(self.join_numbers(meta, answers))
        data = [Score(index=index, score=unpack_floats(one)[0]) for index, one in numbers]
        return Scores(id=meta.id, created=meta.created, model=meta.model, data=data, usage=make_usage(answers))


SCORE = ScoreEndpoint()
RERANKS: Mapping[str, RerankEndpoint] = {path: RerankEndpoint(path) for path in ("/v1/rerank", "/v2/rerank")}
