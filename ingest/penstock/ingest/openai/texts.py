"""What endpoints share that compute something of texts: one request for each part of them, and their numbers joined."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, NamedTuple, TypeVar

from penstock.client.core import Answer, build_answer, join_vectors, split_texts
from penstock.ingest.openai.body import ModelBody, unsupported_value
from penstock.ingest.openai.endpoint import ApiEndpoint, StreamMeta, SubmitArgs, make_request_ids
from penstock.ingest.openai.sse import DONE_ID, NO_POSITION, SseEvent
from penstock.messages import EmbedOptions, EndEvent, Text, TokenEvent
from penstock.names import PriorityClass

MAX_INPUTS = 2048
"""The most texts of one POST, as at OpenAI."""


class Texts(NamedTuple):
    """Texts of which the same is computed."""

    texts: Sequence[Text]
    options: EmbedOptions


class Part(NamedTuple):
    """What one request of the pipeline computes."""

    places: list[int]
    """Where its texts are among all of the body."""
    texts: list[Text]
    options: EmbedOptions


class TextsBody(ModelBody):
    """A body of whose texts something is computed."""

    text_fields: ClassVar[Sequence[str]] = ("input",)
    """The fields that have the texts."""

    def list_texts(self) -> list[Texts]:
        """Return its texts, and what is computed of each."""
        raise NotImplementedError

    @property
    def priority_class(self) -> PriorityClass:
        """The class of its requests."""
        return "interactive"

    @cached_property
    def request_parts(self) -> list[Part]:
        """What each request of the pipeline computes."""
        parts, first = list[Part](), 0
        for texts, options in self.list_texts():
            for part in split_texts(texts):
                parts.append(Part([first + place for place in part], [texts[place] for place in part], options))
            first += len(texts)
        return parts

    @property
    def num_choices(self) -> int:
        """How many requests of the pipeline are needed."""
        return len(self.request_parts)

    def dump_options(self) -> dict[str, Any]:
        """Return all but the texts, and where those of the requests belong."""
        fields = self.model_dump(mode="json", exclude_unset=True, exclude={*self.text_fields})
        return fields | {"places": [*chain.from_iterable(part.places for part in self.request_parts)]}


T = TypeVar("T", bound=TextsBody)


class TextsEndpoint(ApiEndpoint[T]):
    """An endpoint that computes something of texts. Its answers are never streamed as they come: a stream that is read
    has the whole answer as its one event.
    """

    def make_requests(self, body: T, request_id: str, *, sees: bool = False) -> list[SubmitArgs]:
        """Return one request for each part of the texts."""
        ids = make_request_ids(request_id, body.num_choices)
        return [
            SubmitArgs(
                id=one, model=body.model, priority_class=body.priority_class, texts=part.texts, embed=part.options
            )
            for one, part in zip(ids, body.request_parts, strict=True)
        ]

    def choose_prompt(self, body: T, requests: Sequence[SubmitArgs], known: Collection[str]) -> None:
        """Have requests name the prompt that a body means, of those that the model has."""

    @abstractmethod
    def make_answer(self, meta: StreamMeta, answers: Sequence[Answer]) -> Any:
        """Return the whole answer; `answers` are in the order of the requests."""

    def join_numbers(self, meta: StreamMeta, answers: Sequence[Answer]) -> list[bytes]:
        """Return the numbers of each text, in the order of the body. Raises `ModelError`."""
        return join_vectors(meta.options["places"], answers, is_score=self.task == "score")

    def make_chunks(self, meta: StreamMeta) -> "WholeAnswer":
        """Return the maker of the answer's stream."""
        return WholeAnswer(self, meta)


def check_token_ids(requests: Sequence[SubmitArgs], *, takes_ids: bool) -> None:
    """Raise `ApiError` 400 for token ids in place of texts, unless callers mean the model's: SDKs send those of
    OpenAI's tokenizers, which mean other text to this model.
    """
    if not takes_ids and any(not isinstance(text, str) for args in requests for text in args.get("texts") or ()):
        raise unsupported_value(
            "input",
            "token ids are of another tokenizer than this model's. Send texts: with LangChain's OpenAIEmbeddings by "
            "check_embedding_ctx_length=False. If they are this model's, set PENSTOCK_GATEWAY_EMBED_TOKEN_IDS=model "
            "for the gateway.",
        )


def count_tokens(answers: Sequence[Answer]) -> int:
    """Return how many tokens all texts have together."""
    return sum(answer.usage.prompt_tokens for answer in answers)


class WholeAnswer:
    """A stream with the whole answer as its one event, and `[DONE]`."""

    def __init__(self, endpoint: TextsEndpoint[Any], meta: StreamMeta) -> None:
        self._endpoint, self._meta = endpoint, meta
        self._answers: dict[int, Answer] = {}

    def open_choice(self, index: int) -> list[SseEvent]:
        """Return nothing: there are no tokens."""
        return []

    def add_token(self, index: int, event: TokenEvent) -> list[SseEvent]:
        """Return nothing: there are no tokens."""
        return []

    def end_choice(self, index: int, event: EndEvent) -> list[SseEvent]:
        """Keep the numbers of a part."""
        self._answers[index] = build_answer(self._meta.request_ids[index], [event])
        return []

    def end_stream(self) -> list[SseEvent]:
        """Return the answer, and `[DONE]`."""
        answer = self._endpoint.make_answer(self._meta, [one for _, one in sorted(self._answers.items())])
        return [SseEvent(NO_POSITION, answer.model_dump_json()), SseEvent(DONE_ID, "[DONE]")]
