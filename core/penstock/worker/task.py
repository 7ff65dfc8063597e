"""A request in a worker, and what a stage does with it."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span

from penstock.bus.contract import Delivery, Outgoing
from penstock.engine.contract import InferenceEngine, SequenceProgress
from penstock.engine.sequence import Sequence
from penstock.engine.text import OutputText
from penstock.errors import RequestError, RequestTooLarge
from penstock.grammar.engine import CompiledGrammar
from penstock.kvstore.block import PromptBlocks
from penstock.messages import EndEvent, FinishReason, Job, Request, TokenEvent, now_s
from penstock.names import PriorityClass, Stage
from penstock.record import Claim, UnclaimedMessage
from penstock.telemetry import tracing
from penstock.telemetry.genai import Operation
from penstock.worker.delivery_queue import serialize_delivery
from penstock.worker.load import TaskLoad, WorkerLoad


@dataclass(eq=False)
class Task:
    """A request in a worker, from its message to its settlement. Only the loop changes it."""

    id: str
    delivery: Delivery
    """The delivery that it came with. It is not held where the request was taken over."""
    message: Request | Job | None
    """The decoded message; None where it could not be read."""
    operation: Operation
    body_hash: str = ""
    """In prefill the hash of the request's body: a request with the same id and another hash is a conflict."""
    job_name: str = ""
    """In decode the job's name: the first job claimed is bound to the request."""
    token_ids: list[int] = field(default_factory=list)
    """The prompt's token ids."""
    grammar: CompiledGrammar | None = None
    """The grammar of its answer, if it has one."""
    failure: RequestError | None = None
    """Why the message could not be read, if that was not the message's fault."""
    error: RequestError | None = None
    """The error that the request ends with."""
    finish_reason: FinishReason | None = None
    """Why the answer ended. Known with its last token, and written once that token is in the log."""
    tail_text: str = ""
    """Text that was held back when the deadline cut the answer short."""
    claim: Claim = field(init=False)
    """The claim under which it is held, once it is claimed."""
    seq: SequenceProgress | None = None
    """How far the engine is with it; None before there is something to compute, or where nothing is."""
    blocks: PromptBlocks | None = None
    """The names of its prompt's blocks, once it is to be computed."""
    blocks_stored: "Future[float] | None" = None
    """Done when the blocks are stored that must be there before the request may be settled."""
    output: OutputText | None = None
    log_events: list[TokenEvent] = field(default_factory=list)
    """The token events of the log: those that were read, and those sent to it since."""
    end_event: EndEvent | None = None
    """The log's end, once this worker or another has written it."""
    is_in_flight: bool = False
    """Whether a token is on its way to the log."""
    parent_context: Context = field(default_factory=Context)
    """The trace context that its own span is in."""
    span: Span = INVALID_SPAN
    context: Context = field(default_factory=Context)
    """The trace context for the spans of the work on it."""
    started_s: float = field(default_factory=now_s)
    read_s: float = 0.0
    """When its message was read, where that takes time; else 0."""
    first_token_s: float = 0.0
    last_written_s: float | None = None
    """When its last token was written, by the monotonic clock; None before this worker wrote one."""

    @property
    def klass(self) -> PriorityClass:
        """The priority class of the topic that it came by."""
        return self.delivery.klass

    @property
    def deadline(self) -> float | None:
        """The request's deadline in seconds since the epoch, or None."""
        return None if self.message is None else self.message.deadline

    @property
    def tenant(self) -> str:
        """The request's tenant."""
        return "default" if self.message is None else self.message.tenant

    def find_stop(self) -> str | None:
        """Return the stop string that ended the answer, if its request asks for it."""
        tells = isinstance(self.message, Request | Job) and self.message.sampling.tell_stop
        return self.output.stop if tells and self.output is not None else None

    def to_claim_request(self) -> UnclaimedMessage:
        """Return what a claim needs to know of the request.

        The message is left out where it is too large to keep. Then only its delivery can bring the request back.
        """
        is_kept = not isinstance(self.error, RequestTooLarge)
        return UnclaimedMessage(
            self.id, self.body_hash, self.job_name, serialize_delivery(self.delivery) if is_kept else b""
        )

    def start_span(self, name: str) -> None:
        """Start the span of the work on the request."""
        attributes = {"prompt_tokens": len(self.token_ids), "attempt": self.claim.attempts}
        self.span = tracing.start_span(name, self.parent_context, self.read_s or self.started_s, **attributes)
        self.context = tracing.with_span(self.span, self.parent_context)

    @property
    def num_prefilled_tokens(self) -> int:
        """Prompt tokens that were computed here or found. This is the usage if the request ends before token 0."""
        seq = self.seq
        return 0 if seq is None else min(seq.num_prompt_tokens, max(seq.num_cached_tokens, seq.num_computed_tokens))

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was found."""
        return 0 if self.seq is None else self.seq.num_cached_tokens

    @property
    def is_running(self) -> bool:
        """Whether the engine works on it, or has; otherwise it waits for something."""
        return self.seq is not None and not self.seq.is_waiting

    def measure_token_gap(self, now_s: float) -> float | None:
        """Note that a token was written. Returns the seconds since the one before, if this worker wrote that; else
        None.
        """
        before_s, self.last_written_s = self.last_written_s, now_s
        return None if before_s is None else now_s - before_s


class Completion(NamedTuple):
    """What is published when a request is through with a stage."""

    outputs: list[Outgoing]
    dead_letters: list[Outgoing]
    """Its dead letter, if the request's error calls for one."""
    span_attributes: dict[str, str]
    """Attributes of the settlement's span."""
    rename: Callable[[Outgoing], Outgoing] | None = None
    """Returns one of `outputs` under a new name, made of the message alone: it is called on the settler's thread."""


class Role(Protocol):
    """What a stage does with a request: how it is read, computed and completed, and how many fit."""

    stage: Stage
    engine: InferenceEngine
    max_inline_bytes: int
    """The loop itself reads messages up to this size; longer ones, and those with a grammar, are read on a thread."""
    hands_off: bool
    """Whether requests go on in another stage. Their claims are given up once that stage has them and the leases on
    their blocks.
    """
    settle_span_name: str
    """The name of a settlement's span."""

    def identify_request(self, delivery: Delivery) -> Task | None:
        """Return the request of a message, with an error if it is invalid; None where not even an id can be read."""

    def read_message(self, delivery: Delivery) -> Task | None:
        """Return the request of a message with its prompt, else like `identify_request`. Any thread may call this."""

    def build_request(self, task: Task) -> Sequence | None:
        """Return what the engine is to compute; None where the answer is complete already.

        Raises a `RequestError` where the request cannot be computed.
        """

    def build_end_event(self, task: Task) -> EndEvent:
        """Return the end of its log, stamped now."""

    def build_completion(self, task: Task) -> Completion | None:
        """Return what is published now that it is through; None where Redis has lost too much of its log."""

    def build_failed_output(self, task: Task) -> Outgoing:
        """Return what is published, in fixed words, where `build_completion` fails."""

    def free_capacity(self, klass: PriorityClass, tasks: Collection[Task], num_read: int, load: WorkerLoad) -> int:
        """Return how many more requests of a class to take.

        `tasks` and the `num_read` messages being read are of this class and the classes above.
        """

    def measure_task_load(self, task: Task) -> TaskLoad:
        """Return the work that a request still needs, for the heartbeat."""

    def report_rates(self, load: WorkerLoad) -> dict[str, object]:
        """Return the worker's rates, for the heartbeat."""
