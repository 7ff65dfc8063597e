"""A request as prefill takes it in: what its message says, or what is wrong with it."""

import hashlib
import logging
from dataclasses import dataclass, field

from opentelemetry.context import Context

from penstock import tracing
from penstock.bus.contract import Delivery
from penstock.errors import InvalidRequest, RequestError, RequestTooLarge
from penstock.messages import Request, decode, now_s, readable_id
from penstock.names import Pipeline
from penstock.record import Waiting, body_hash
from penstock.telemetry.genai import Operation, operation_of
from penstock.worker import cause_of, pack
from prefill_worker.tokenize import PromptReader

log = logging.getLogger(__name__)


@dataclass
class Intake:
    """A request as prefill holds it: its delivery and what is known of it so far."""

    delivery: Delivery
    id: str
    body: str
    """Hash of what was asked: an id with another one is a conflict."""
    request: Request | None = None
    """None where the message could not be read."""
    token_ids: list[int] = field(default_factory=list)
    error: RequestError | None = None
    started_s: float = field(default_factory=now_s)
    read_s: float = 0.0
    """When the message was decoded, validated and tokenized."""
    first_token_s: float = 0.0
    prompt_tokens: int = 0
    """Of the prompt, how many were computed here or found: what an end before token 0 says was used."""
    cached_tokens: int = 0
    last_block: str = ""
    is_ended: bool = False
    """Its end is in the log, by this worker's doing."""
    context: Context = field(default_factory=Context)
    """Of the span that later spans are children of."""

    @property
    def is_too_large(self) -> bool:
        """Whether nothing of its message is kept beside the topic: then only its delivery can bring it back."""
        return isinstance(self.error, RequestTooLarge)

    @property
    def operation(self) -> Operation:
        """What it asks for, as OpenTelemetry calls it."""
        return operation_of(self.request)


def identify(delivery: Delivery) -> Intake | None:
    """The request, or what is wrong with it; None where not even an id can be read."""
    started_s = now_s()
    try:
        request = decode(Request, delivery.value)
        return Intake(delivery, request.id, body_hash(request), request, started_s=started_s)
    except RequestError as error:
        found = error
    except Exception as error:  # a bug is this request's, not its neighbours'
        log.exception("a message of %s", delivery.topic)
        found = cause_of(error)
    request_id = readable_id(delivery.value, delivery.key)
    if request_id is None:
        return None
    body = hashlib.sha256(delivery.value).hexdigest()
    return Intake(delivery, request_id, body, error=found, started_s=started_s)


def waiting_of(delivery: Delivery) -> Waiting | None:
    """The request as it is known while its message waits."""
    intake = identify(delivery)
    return None if intake is None or intake.is_too_large else Waiting(intake.id, intake.body, "", pack(delivery))


def read(pipeline: Pipeline, delivery: Delivery, prompts: PromptReader) -> Intake | None:
    """The request and its token ids, or what is wrong with it; None where not even an id can be read."""
    intake = identify(delivery)
    if intake is None:
        return None
    if intake.request is not None:
        _tokenize(intake, intake.request, prompts)
    intake.read_s = now_s()
    whose = tracing.about(pipeline, intake.id, Context())
    intake.context = tracing.context_of(delivery.headers, whose, delivery.timestamp_s)
    return intake


def _tokenize(intake: Intake, request: Request, prompts: PromptReader) -> None:
    klass = intake.delivery.klass
    try:
        if request.klass not in (None, klass):
            raise InvalidRequest(f"class {request.klass!r} in the topic of class {klass!r}")
        intake.token_ids = prompts.read(request)
    except RequestError as error:
        intake.error = error
    except Exception as error:  # a bug is this request's, not its neighbours'
        log.exception("request %s", intake.id)
        intake.error = cause_of(error)


def seed_of(request: Request) -> int:
    """The seed given, or one derived from the id: the same for every attempt."""
    if request.sampling.seed is not None:
        return request.sampling.seed
    return int.from_bytes(hashlib.sha256(request.id.encode()).digest()[:8], "big") >> 1
