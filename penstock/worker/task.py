"""A request in a worker, and what a stage makes of it."""

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span

from penstock.bus.contract import Delivery, Outgoing
from penstock.engine.engine import Engine
from penstock.engine.sequence import Sequence, State
from penstock.engine.text import OutputText
from penstock.errors import RequestError, RequestTooLarge
from penstock.kvstore.connector import KVConnector, SequenceBlocks
from penstock.messages import EndEvent, FinishReason, Job, Request, TokenEvent, now_s
from penstock.names import PriorityClass, Stage
from penstock.record import Claim, Waiting
from penstock.telemetry import tracing
from penstock.telemetry.genai import Operation
from penstock.worker.delivery_queue import serialize_delivery
from penstock.worker.load import TaskLoad, WorkerLoad


@dataclass(eq=False)
class Task:
    """A request in a worker, from its message to its settlement. Only the loop changes it."""

    id: str
    delivery: Delivery
    """What it came with; not held where it was taken over."""
    message: Request | Job | None
    """None where it could not be read."""
    operation: Operation
    body_hash: str = ""
    """In prefill the hash of what was asked: an id with another one is a conflict."""
    job_name: str = ""
    """In decode the job's: the first one claimed is bound to the request."""
    token_ids: list[int] = field(default_factory=list)
    """The prompt."""
    failure: RequestError | None = None
    """Why it could not be read, if that was not the message's fault."""
    error: RequestError | None = None
    """What it ends with."""
    finish_reason: FinishReason | None = None
    """How it ended: known with its last token, written once that token is in the log."""
    tail_text: str = ""
    """Text held back when the deadline cut the answer short."""
    claim: Claim = field(init=False)
    """What it is held with, once it is claimed."""
    seq: Sequence | None = None
    """None before there is something to compute, or where nothing is."""
    blocks: SequenceBlocks | None = None
    blocks_stored: "Future[float] | None" = None
    """Done when the blocks are stored that have to be before it may be settled."""
    output: OutputText | None = None
    log_events: list[TokenEvent] = field(default_factory=list)
    """The log, as far as it was read, and what was sent to it since."""
    end_event: EndEvent | None = None
    """The log's end, once it is written by this worker or another."""
    is_in_flight: bool = False
    """Whether a token is on its way to the log."""
    parent_context: Context = field(default_factory=Context)
    """What its span is in."""
    span: Span = INVALID_SPAN
    context: Context = field(default_factory=Context)
    """What the spans of the work on it are in."""
    started_s: float = field(default_factory=now_s)
    read_s: float = 0.0
    """When its message was read, where that takes time."""
    first_token_s: float = 0.0
    last_written_s: float | None = None
    """When its last token was written, by the monotonic clock; None before this worker wrote one."""

    @property
    def klass(self) -> PriorityClass:
        """The class of the topic that it came by."""
        return self.delivery.klass

    @property
    def deadline(self) -> float | None:
        """When it is too late, in seconds since the epoch."""
        return None if self.message is None else self.message.deadline

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return "default" if self.message is None else self.message.tenant

    def to_claim_request(self) -> Waiting:
        """It, as a claim knows it. Of what is too large nothing is kept: then only its delivery can bring it back."""
        is_kept = not isinstance(self.error, RequestTooLarge)
        return Waiting(self.id, self.body_hash, self.job_name, serialize_delivery(self.delivery) if is_kept else b"")

    def start_span(self, name: str) -> None:
        """The work on it begins."""
        told = {"prompt_tokens": len(self.token_ids), "attempt": self.claim.attempts}
        self.span = tracing.start_span(name, self.parent_context, self.read_s or self.started_s, **told)
        self.context = tracing.with_span(self.span, self.parent_context)

    @property
    def num_prefilled_tokens(self) -> int:
        """Of the prompt, how many were computed here or found: what an end before token 0 says was used."""
        seq = self.seq
        return 0 if seq is None else min(seq.num_prompt_tokens, max(seq.num_cached_tokens, seq.num_computed_tokens))

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, how many were found."""
        return 0 if self.seq is None else self.seq.num_cached_tokens

    @property
    def is_running(self) -> bool:
        """Whether the engine works on it, or has; otherwise it waits for something."""
        return self.seq is not None and self.seq.state is not State.WAITING

    def measure_token_gap(self, now_s: float) -> float | None:
        """A token was written: how long after the one before it, if this worker wrote that."""
        before_s, self.last_written_s = self.last_written_s, now_s
        return None if before_s is None else now_s - before_s


class Completion(NamedTuple):
    """What goes out when a request is through with a stage."""

    outputs: list[Outgoing]
    dead_letters: list[Outgoing]
    """Its dead letter, if somebody should look at it."""
    span_attributes: dict[str, str]
    """What the span of its settlement says of it."""


class Role(Protocol):
    """What a stage makes of a request: what a task is there, when it is through, and how many fit."""

    stage: Stage
    engine: Engine
    max_inline_bytes: int
    """A message up to this size is read by the loop itself, a longer one on a thread."""
    hands_off: bool
    """Whether requests go on in another stage: their claims are given up once that has them, and it has the leases on
    their blocks."""
    settle_span_name: str
    """What the span of a settlement is called."""

    def identify_request(self, delivery: Delivery) -> Task | None:
        """The request of a message, or what is wrong with it; None where not even an id can be read."""

    def read_message(self, delivery: Delivery) -> Task | None:
        """The same with its prompt. Any thread may ask."""

    def build_sequence(self, task: Task, kv: KVConnector) -> Sequence | None:
        """What the engine is to compute for a claimed request; None where its answer is complete already.

        Raises a `RequestError` where there is nothing to compute.
        """

    def build_end_event(self, task: Task) -> EndEvent:
        """The end of its log, stamped now."""

    def build_completion(self, task: Task) -> Completion | None:
        """What goes out now that it is through; None where Redis has forgotten too much of it."""

    def free_capacity(self, klass: PriorityClass, tasks: Collection[Task], num_read: int, load: WorkerLoad) -> int:
        """How many more of a class to take beside `tasks` and those that are being read, of it and classes above."""

    def measure_task_load(self, task: Task) -> TaskLoad:
        """What it stands for in the heartbeat."""

    def report_rates(self, load: WorkerLoad) -> dict[str, object]:
        """How fast the worker is, for the heartbeat."""
