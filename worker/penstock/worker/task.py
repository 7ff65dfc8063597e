"""A request in a worker, and what a stage does with it."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from penstock.bus.contract import Delivery, Outgoing
from penstock.engine.contract import Loaded, Outcome, SampledToken, SequenceProgress, TokenSource
from penstock.errors import RequestError, RequestTooLarge
from penstock.messages import Adapter, EndEvent, ErrorInfo, FinishReason, Job, Request, TokenEvent, now_s
from penstock.names import KEY_HEADER, STAGES, PriorityClass, Stage, WorkerKind, find_key
from penstock.record import Claim, UnclaimedMessage
from penstock.sealing import find_tenant
from penstock.telemetry import tracing
from penstock.telemetry.seconds import Work
from penstock.telemetry.stage import StageMetrics
from penstock.telemetry.timeline import SCORES_ATTRIBUTE, TEXTS_ATTRIBUTE
from penstock.telemetry.tracing import Operation
from penstock.worker.delivery_queue import serialize_delivery
from penstock.worker.load import TaskLoad, WorkerLoad

if TYPE_CHECKING:  # workers without a model of their own do without its libraries
    from penstock.engine.pictures.rows import Pictures
    from penstock.engine.text.detokenizer import Detokenizer
    from penstock.grammar.engine import CompiledGrammar
    from penstock.kvstore.block import PromptBlocks


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
    """The hash of a request's body; empty for a job. A message with the same id and another hash is a conflict."""
    name: str = ""
    """The name that is bound to the request if this message settles its result: the job's name, or the name of the
    place of the request's own message in its topic.
    """
    token_ids: list[int] = field(default_factory=list)
    """The prompt's token ids."""
    pictures: "Pictures | None" = None
    """The pictures in the prompt, once it is read."""
    adapter: Adapter | None = None
    """The adapter that computes its answer in the model's place: of a job from the start, of a request once it is read.
    """
    grammar: "CompiledGrammar | None" = None
    """The grammar of its answer, if it has one."""
    outcome: Outcome | None = None
    """How it ends, once that is known: with the message that cannot be read, or with the last token. It is written once
    all tokens are in the log.
    """
    tail_text: str = ""
    """Text that was held back when the deadline cut the answer short."""
    role: "Role" = field(init=False)
    """The role that treats it, which is that of its message's topic. It is set once the message is identified."""
    leaving_for: str = ""
    """Why another worker goes on with it, or ends it, once its next token is in the log; empty where it stays."""
    claim: Claim = field(init=False)
    """The claim under which it is held, once it is claimed."""
    seq: SequenceProgress | None = None
    """How far the engine is with it; None before there is something to compute, or where nothing is."""
    blocks: "PromptBlocks | None" = None
    """The names of its prompt's blocks, once it is to be computed."""
    blocks_stored: "Future[float] | None" = None
    """Done when the blocks are stored that must be there before the request may be settled."""
    output: "Detokenizer | None" = None
    log_events: list[TokenEvent] = field(default_factory=list)
    """The token events of the log: those that were read, and those sent to it since."""
    num_in_flight: int = 0
    """How many tokens are on their way to the log."""
    parent_context: Context = field(default_factory=Context)
    """The trace context that its own span is in."""
    span: Span = INVALID_SPAN
    context: Context = field(default_factory=Context)
    """The trace context for the spans of the work on it."""
    settling_span: Span = INVALID_SPAN
    """The span of its settlement; a job's, which is a producer's, is the parent of the spans in the next worker."""
    settling_since_s: float = 0.0
    """When its settlement began."""
    started_s: float = field(default_factory=now_s)
    read_s: float = 0.0
    """When its message was read, where that takes time; else 0."""
    is_prompt_counted: bool = False
    """Whether its prompt's tokens are in the metrics of the worker that computed it."""
    first_token_s: float = 0.0
    last_written_s: float | None = None
    """When its last token was written, by the monotonic clock; None before this worker wrote one."""

    @property
    def priority_class(self) -> PriorityClass:
        """The priority class of the topic that it came by."""
        return self.delivery.priority_class

    @property
    def trace_id(self) -> str:
        """The id of its trace, for exemplars; empty where that is not recorded."""
        return tracing.format_trace_id(self.context)

    @property
    def deadline(self) -> float | None:
        """The request's deadline in seconds since the epoch, or None."""
        return None if self.message is None else self.message.deadline

    @property
    def adapter_digest(self) -> str:
        """The digest of the adapter that computes its answer; empty for the model itself."""
        return "" if self.adapter is None else self.adapter.digest

    @property
    def num_texts(self) -> int:
        """How many texts it has, of which vectors or scores are computed, and no tokens."""
        return 0 if self.message is None else len(self.message.texts or ())

    @property
    def tenant(self) -> str:
        """The request's tenant."""
        return find_tenant(self.delivery.value) if self.message is None else self.message.tenant

    @cached_property
    def works(self) -> dict[Stage, Work]:
        """What seconds that are spent on it are told apart by, in each stage."""
        owner = self.priority_class, self.tenant, find_key(self.delivery.headers)
        return {stage: Work(stage, *owner) for stage in STAGES}

    @property
    def account_headers(self) -> dict[str, str]:
        """The headers by which accounts go on with a request: what follows from it has them, too."""
        key = find_key(self.delivery.headers)
        return {KEY_HEADER: key} if key else {}

    @property
    def error(self) -> RequestError | None:
        """The error that it ends with, or would end with if it were not tried again."""
        return None if self.outcome is None else self.outcome.error

    @property
    def wire_error(self) -> ErrorInfo | None:
        """The error as messages and events have it."""
        return None if self.error is None else ErrorInfo.from_error(self.error)

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return "error" if self.outcome is None else self.outcome.finish_reason

    def find_stop(self) -> str | None:
        """Return the stop string that ended the answer, if its request asks for it."""
        if self.message is None or not self.message.sampling.tell_stop:
            return None
        if self.outcome is not None and self.outcome.stop is not None:
            return self.outcome.stop
        return None if self.output is None else self.output.stop

    def is_same_request(self, other: "Task") -> bool:
        """Return whether two messages of a request ask for the same: they have one body, or are one job."""
        return (self.body_hash, self.name) == (other.body_hash, other.name)

    def to_claim_request(self) -> UnclaimedMessage:
        """Return what a claim needs to know of the request.

        The message is left out where it is too large to keep. Then only its delivery can bring the request back.
        """
        is_kept = not isinstance(self.error, RequestTooLarge)
        message = serialize_delivery(self.delivery, self.tenant, self.id) if is_kept else b""
        return UnclaimedMessage(self.id, self.body_hash, self.name, message, self.delivery.since_result_s)

    @property
    def is_in_flight(self) -> bool:
        """Whether a token is on its way to the log."""
        return self.num_in_flight > 0

    @property
    def hands_off(self) -> bool:
        """Whether it goes on, or ends, in another worker."""
        return bool(self.leaving_for)

    def find_cause_to_leave(self) -> str:
        """Return why the request is handed off now that it ends; empty where this worker settles its result.

        An earlier claim may have handed the request off already. Then its own message is not bound; the first job that
        is claimed is.
        """
        is_own = self.claim.stage == "prefill"
        return self.role.hands_off_for or ("ended" if is_own and self.claim.may_be_sent_on else "")

    @property
    def bound_name(self) -> str:
        """The name of the request's own message, where this worker has its delivery and settles its result; else empty.

        It is bound to the request with its end. Without the delivery that may be settled already, with a job that
        nobody has read yet.
        """
        is_own = self.claim.stage == "prefill" and self.delivery.is_held and not self.hands_off
        return self.name if is_own else ""

    def start_span(self, name: str, since_s: float) -> None:
        """Start the span of the work on the request, and end that of the work before, if there is one.

        The first one consumes the message: a service graph has one consumer for each producer.
        """
        kind = SpanKind.CONSUMER if self.span is INVALID_SPAN else SpanKind.INTERNAL
        self.span.end()
        num_tokens = self.seq.num_prompt_tokens if self.num_texts and self.seq is not None else len(self.token_ids)
        attributes = {"prompt_tokens": num_tokens, "attempt": self.claim.attempts}
        if isinstance(self.message, Request) and self.num_texts:
            is_scored = self.message.embed is not None and self.message.embed.query is not None
            attributes |= {TEXTS_ATTRIBUTE: self.num_texts, SCORES_ATTRIBUTE: is_scored}
        self.span = tracing.start_span(name, self.parent_context, since_s, kind, **attributes)
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


class StageOutput(NamedTuple):
    """The messages that are published when a request is through with a stage."""

    outputs: list[Outgoing]
    dead_letters: list[Outgoing]
    """Its dead letter, if the request's error calls for one."""
    span_attributes: dict[str, str]
    """Attributes of the settlement's span."""
    rename: Callable[[Outgoing], Outgoing] | None = None
    """Returns one of `outputs` under a new name, made of the message alone: it is called on the settler's thread."""


class Role(Protocol):
    """The part of a kind of worker: it reads, computes and completes requests, and says how many fit.

    A role is a subclass. It writes all methods but those that do nothing here.
    """

    kind: WorkerKind
    stage: Stage
    """The stage under which the kind's requests are claimed: an endpoint worker claims them as decode claims jobs."""
    hands_off_for: str
    """Why all requests go on in another worker, as jobs, also those that have ended here; empty where they may stay."""
    max_inline_bytes: int
    """The loop itself decodes and reads messages up to this size, but compiles no grammar; a thread does the rest."""
    writes_pieces: bool
    """Whether the events of its logs are pieces of text; otherwise each event is a token."""

    engine: TokenSource
    """The engine that computes its requests."""
    model_name: str
    """The name that requests have for the model."""

    # 1 and 6. Claim.

    def free_capacity(
        self, priority_class: PriorityClass, tasks: Collection[Task], num_read: int, load: WorkerLoad
    ) -> int:
        """Return how many more requests of a class to take.

        `tasks` and the `num_read` messages being read are of this class and the classes above.
        """

    def identify_request(self, delivery: Delivery) -> Task | None:
        """Return the request of a message, with an error if it is invalid; None where not even an id can be read.

        Any thread may call this, before the request is claimed: it does no more than decode the message.
        """

    def read_request(self, task: Task, *, may_wait: bool) -> bool:
        """Read what a claimed request asks for: its prompt's tokens, its grammar. Any thread may call this.

        Without `may_wait` return False for a request that takes time: a thread reads it. An error that this raises ends
        the request, or has it tried again.
        """

    # 3 and 6. Load.

    def note_loaded(self, task: Task, loaded: Loaded) -> None:
        """Note that the blocks of a request that were found are loaded, before the rest is computed: set `leaving_for`
        where it is better decoded elsewhere.
        """
        return

    def begin_request(self, task: Task, load: WorkerLoad) -> bool:
        """Hand a request to the engine, and add its length to the means. Return False where the answer is complete
        already, and the task has its `outcome`.

        Raises a `RequestError` where the request cannot be computed.
        """

    def leaves_preempted(self, task: Task) -> bool:
        """Return whether a request with tokens, whose blocks went to others, is better decoded elsewhere; then it has
        `leaving_for`. Otherwise it waits for blocks here.
        """
        return False

    def gives_back(self, task: Task) -> bool:
        """Return whether a request goes back to a worker that sees pictures, as a row of one is to be computed."""
        return False

    # 4 and 7. Append.

    def make_event(self, task: Task, item: SampledToken) -> TokenEvent | None:
        """Return the log event of a request's next token; None where the log has it already.

        Set the task's `outcome` where it is the last one.
        """

    def finish_computed(self, task: Task, item: SampledToken, metrics: StageMetrics) -> bool:
        """Have the last blocks of a request stored that is through with this stage, once its token is on its way to the
        log. Return whether there are any that nothing waits for.
        """

    def record_token(self, task: Task, sent_s: float, written_s: float, metrics: StageMetrics) -> None:
        """Record that a token is in the log. It was sent at `sent_s`, by the wall clock, and the answer was read at
        `written_s`, by the monotonic clock.
        """

    # 8. End.

    def build_end_event(self, task: Task) -> EndEvent:
        """Return the end of its log, stamped now."""

    # 5 and 9. Settle.

    def build_stage_output(self, task: Task) -> StageOutput | None:
        """Return what is published now that it is through; None where Redis has lost too much of its log."""

    def build_failed_output(self, task: Task) -> Outgoing:
        """Return what is published, in fixed words, where `build_stage_output` fails."""

    def end_leases(self, task: Task) -> None:
        """End the leases that were made on the blocks of a request's prompt for this stage."""
        return

    # For the heartbeat.

    def count_done(self, sampled: Collection[SampledToken]) -> int:
        """Return the tokens of a turn for the throughput: prompt tokens that were computed, or tokens of answers."""

    def measure_task_load(self, task: Task) -> TaskLoad:
        """Return the work that a request still needs."""

    def report_rates(self, load: WorkerLoad) -> dict[str, object]:
        """Return the worker's rates."""
