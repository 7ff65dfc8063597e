"""A request as decode holds it: its job, what it has said, and the blocks that it has said it with."""

import contextlib
import hashlib
from dataclasses import dataclass, field, replace

from opentelemetry.context import Context
from opentelemetry.trace import Span
from pydantic import ValidationError

from engine.sequence import Sequence, State
from engine.text import OutputState
from kvstore.block import Name
from kvstore.chain import Chain
from kvstore.store import Lack
from penstock import tracing
from penstock.bus.contract import Delivery
from penstock.errors import InternalError, RequestError
from penstock.messages import (
    EndEvent,
    ErrorInfo,
    FinishReason,
    Job,
    TokenEvent,
    Usage,
    decode,
    now_s,
    readable_id,
    readable_job,
)
from penstock.names import TENANT
from penstock.record import Claim, Waiting
from penstock.worker import Held, cause_to_end, is_suspect, pack


@dataclass
class Decode:
    """A request whose answer is being written."""

    delivery: Delivery
    job: Job
    claim: Claim
    output: OutputState
    around: Context
    """What its span is in."""
    span: Span
    said: list[TokenEvent]
    """The log: as it was found, and what was sent to it since."""
    chain: Chain
    """Names the blocks of prompt and answer."""
    partial: Name | None = None
    """Of the prompt's last block, if that is partial."""
    seq: Sequence | None = None
    """None where there is nothing to generate."""
    lacks: dict[int, Lack] = field(default_factory=dict)
    """Full blocks that are to be written, and the tiers that lack them."""
    num_seen: int = 0
    """Full blocks, as of the last look at it."""
    started_s: float = field(default_factory=now_s)
    finish: FinishReason | None = None
    """Set with the last token; the end is appended once that token is in the log."""
    error: RequestError | None = None
    written_s: float | None = None
    """When its last token was written, by the monotonic clock; None before this worker wrote one."""
    tail: str = ""
    """Text held back when the deadline cut the answer short."""
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        self.context = tracing.within(self.span, self.around)

    def detach(self) -> None:
        """Go on without the delivery."""
        self.delivery = replace(self.delivery, is_held=False)

    def prompt_names(self) -> list[Name]:
        """Of the prompt's blocks, a partial last one included."""
        names = self.chain.names[: len(self.job.token_ids) // self.chain.block_size]
        return [*names, self.partial] if self.partial else names

    def sequence(self) -> Sequence:
        """What the engine is to compute: all tokens that there are, and those to come."""
        job = self.job
        return Sequence(
            job.id,
            job.token_ids,
            sampling=job.sampling,
            seed=job.seed,
            max_new=job.sampling.max_tokens,
            given=[event.token for event in self.said],
            klass=job.klass,
            tenant=job.tenant,
            weight=job.weight,
            suspect=is_suspect(self.claim),
        )

    def cause_to_end(self) -> RequestError | None:
        """Why there is nothing to generate, if so."""
        if self.job.error is not None:
            return self.job.error.exception()
        if not self.job.token_ids:
            return InternalError("a job without a prompt")
        return cause_to_end(self.claim, self.job.deadline)

    def since_last(self, now_s: float) -> float | None:
        """A token was written: how long after the one before it, if this worker wrote that."""
        before_s, self.written_s = self.written_s, now_s
        return None if before_s is None else now_s - before_s

    def held(self) -> Held:
        """What it stands for in the heartbeat."""
        is_running = self.seq is not None and self.seq.state is not State.WAITING
        pending = self.seq.num_pending - 1 if self.seq is not None and is_running else 0  # else it may be stored
        left = self.job.sampling.max_tokens - self.claim.num_tokens
        return Held(self.delivery.klass, is_running, max(0, pending), left)

    def end_event(self) -> EndEvent:
        """The end of the log, stamped now."""
        # A job that carries an error was given up in prefill, and its end there, which Redis lost, said what was used.
        is_prefilled = self.job.error is None or self.claim.num_tokens > 0
        usage = Usage(
            prompt_tokens=len(self.job.token_ids) if is_prefilled else 0,
            cached_tokens=self.job.cached_tokens if is_prefilled else 0,
            completion_tokens=self.claim.num_tokens,
        )
        timings = self.job.timings.model_copy(update={"decode_started": self.started_s, "finished": now_s()})
        error = None if self.error is None else ErrorInfo.of(self.error)
        return EndEvent(finish_reason=self.finish or "error", text=self.tail, usage=usage, timings=timings, error=error)


def read_job(delivery: Delivery) -> tuple[Job, RequestError | None] | None:
    """The job of a message. Of one that cannot be read, only whose it is, and what is wrong; None where not even that
    can be read.
    """
    try:
        return decode(Job, delivery.value), None
    except RequestError as error:
        request_id = readable_id(delivery.value, delivery.key)
        if request_id is None:
            return None
        # Its own name, as who can read it binds the request by that. Without one, the same whoever tries.
        name = readable_job(delivery.value) or hashlib.sha256(delivery.value).hexdigest()
        job = Job(id=request_id, job=name, klass=delivery.klass)
        with contextlib.suppress(ValidationError):
            job = Job(id=request_id, job=name, klass=delivery.klass, tenant=delivery.headers.get(TENANT, job.tenant))
        return job, InternalError(f"its job cannot be read: {error.code}: {error}")


def waiting_of(delivery: Delivery) -> Waiting | None:
    """The request of a job that waits; None where it cannot be read."""
    with contextlib.suppress(RequestError):
        job = decode(Job, delivery.value)
        return Waiting(job.id, "", job.job, pack(delivery))
    return None
