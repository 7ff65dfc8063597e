"""What all endpoints have in common: one interface, used by the gateway's routes and by the batch runner.

body = endpoint.parse(raw)                  # ApiError 400, with the parameter's name
asks = endpoint.asks(body, request_id)      # what to submit: one request for each choice
card = card_of(endpoint, body, request_id)  # what has to be known to make the answer of the results
endpoint.whole(card, answers)               # the body of the answer
endpoint.chunks(card)                       # or its streaming pieces
"""

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from pydantic import BaseModel, ConfigDict

from penstock.client.core import Answer, RequestFields
from penstock.ingest.openai.body import Body
from penstock.ingest.openai.sse import SseEvent
from penstock.messages import EndEvent, TokenEvent

B = TypeVar("B", bound=Body)


class SubmitArgs(RequestFields, total=False):
    """One request for the pipeline: `client.submit(**ask)`."""

    prompt: str | None


class StreamMeta(BaseModel):
    """What a gateway that never saw a request has to know to stream its answer."""

    model_config = ConfigDict(frozen=True)

    id: str
    path: str
    """The endpoint's."""
    model: str
    """As it was asked for."""
    created: int
    """Seconds since the epoch."""
    request_ids: list[str]
    """Of the pipeline's requests, one for each choice."""
    options: dict[str, Any] = {}
    """The body without its prompt."""
    body_hash: str = ""
    """Of all that decides the answer: streamed or not is no difference."""
    bodies: list[str] = []
    """The body hash of each of the pipeline's requests (`penstock.record.claim.body_hash`): their records have the
    same, unless somebody else has used the id."""
    published: float = 0.0
    """When its requests were published last, in seconds since the epoch; 0: nobody noted that they were."""
    pipeline: str = ""
    tenant: str = "default"


class AnswerChunks(Protocol):
    """One stream's pieces; told everything from the beginning, in any order of the choices."""

    def open_choice(self, index: int) -> Sequence[SseEvent]:
        """What comes before the first token of a choice."""

    def add_token(self, index: int, event: TokenEvent) -> Sequence[SseEvent]:
        """What a token adds."""

    def end_choice(self, index: int, event: EndEvent) -> Sequence[SseEvent]:
        """What comes at the end of a choice."""

    def end_stream(self) -> Sequence[SseEvent]:
        """What comes after the ends of all choices. The last piece's place is `places.DONE`."""


class Endpoint(Protocol, Generic[B]):
    """One of OpenAI's endpoints."""

    path: str
    id_prefix: str
    """How ids begin."""
    prompt_field: str
    """The parameter that has the prompt."""

    @property
    def body_model(self) -> type[B]:
        """What is asked."""

    @property
    def answer_model(self) -> type[BaseModel]:
        """The answer as a whole."""

    def parse_body(self, raw: bytes | dict[str, Any]) -> B:
        """The body, or `ApiError` 400 that names the parameter."""

    def make_requests(self, body: B, request_id: str) -> list[SubmitArgs]:
        """What to ask of the pipeline, one request for each choice, in the order of their indices.

        The ids are `request_id`, or `request_id.0`, `.1`, … where there are several. Tenant, session and deadline are
        still to be added. Raises `ApiError` 400.
        """

    def make_answer(self, card: StreamMeta, answers: Sequence[Answer]) -> BaseModel:
        """The answer as a whole; `answers` in the order of the asks."""

    def make_chunks(self, card: StreamMeta) -> AnswerChunks:
        """The answer in pieces."""


def make_stream_meta(
    endpoint: Endpoint[B], body: B, request_id: str, *, pipeline: str = "", tenant: str = "default"
) -> StreamMeta:
    """The card of a request that is made now."""
    options = body.model_dump(mode="json", exclude_unset=True)
    relevant_options = {name: value for name, value in options.items() if name not in ("stream", "stream_options")}
    canonical = json.dumps([endpoint.path, relevant_options], sort_keys=True)
    return StreamMeta(
        id=request_id,
        path=endpoint.path,
        model=body.model,
        created=int(time.time()),
        request_ids=make_request_ids(request_id, body.num_choices),
        options={name: value for name, value in options.items() if name not in ("messages", "prompt", "input")},
        body_hash=hashlib.sha256(canonical.encode()).hexdigest(),
        pipeline=pipeline,
        tenant=tenant,
    )


def make_submit_args(fields: RequestFields, seed: RequestFields, request_id: str) -> SubmitArgs:
    """One choice's request, its prompt still to be added if that is no chat."""
    return cast("SubmitArgs", {**fields, **seed, "id": request_id})


def cap_open_answers(requests: Sequence[SubmitArgs], max_tokens: int | None) -> None:
    """Let answers that have no limit end where together they have `most` tokens, but with one each at least."""
    for args in requests:
        if max_tokens is not None and "fit_context" in args:
            args["max_tokens"] = min(args["max_tokens"], max(1, max_tokens // len(requests)))


def make_request_ids(request_id: str, num_choices: int) -> list[str]:
    """The ids of the pipeline's requests behind one of ours."""
    return [request_id] if num_choices == 1 else [f"{request_id}.{index}" for index in range(num_choices)]
