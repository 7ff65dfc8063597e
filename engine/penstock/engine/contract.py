"""The interface between a worker and an engine. `penstock.engine.serving` is the engine of this project.

A worker's loop asks for a `TokenSource`, wherever its tokens come from: `penstock.endpoint_worker.engine` asks
servers for them. An `InferenceEngine` has a model and KV of its own. A worker hands it requests, names of blocks and
leases, and hears what became of them. The engine computes, and moves KV between its own memory and the stores: blocks'
bytes never come to the worker, and may be in other processes.

    add_request ─▶ (its blocks are loaded) ─▶ Loaded ─▶ begin_step, finish_step ─▶ … ─▶ finish_request ─▶ Stored
         │                                                    │
         └───────────────── remove_request, at any time ──────┘

A request is a `Sequence` (`penstock.engine.sequence`): the caller makes it, and from `add_request` on it is the
engine's, which notes in it how far it is. It is named by its id; there is one of an id at a time. One thread calls an
engine, if nothing else is said.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from penstock.errors import Cancelled, ModelError, RequestError
from penstock.messages import EndEvent, FinishReason, Logprobs, Usage, Vectors
from penstock.names import PriorityClass, Stage
from penstock.worker_speed import WorkerSpeed

if TYPE_CHECKING:  # workers without a model of their own do without the libraries of both
    from penstock.engine.pictures.reader import PictureReader
    from penstock.engine.pictures.rows import Pictures, PromptPicture
    from penstock.engine.pictures.vision import Pixels
    from penstock.engine.sequence import Sequence as EngineSequence
    from penstock.engine.vectors import TextReader, TextRequest
    from penstock.kvstore.block import PromptBlocks, Span


class ModelCard(Protocol):
    """The model of an engine, as workers know it."""

    @property
    def name(self) -> str:
        """The name that requests have for it."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers has it."""

    @property
    def response_template(self) -> dict[str, Any] | None:
        """The template by which transformers tells calls and reasoning from an answer's text. None if they cannot be
        told.
        """

    @property
    def text_reader(self) -> "TextReader | None":
        """Reads texts, if the model computes vectors of them."""

    @property
    def picture_reader(self) -> "PictureReader | None":
        """Reads pictures, if the model sees them, and this worker computes what it sees."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """The digest of each LoRA adapter that computes answers in its place, by the name that requests have for it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and output together."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def fingerprint(self) -> str:
        """Hex digest: engines with the same one can exchange KV blocks."""


class EngineLimits(NamedTuple):
    """How much an engine takes."""

    max_batch: int
    """Requests that it computes at the same time."""
    max_step_tokens: int
    """Tokens that it computes in one step at most, beside those that decode now."""
    max_length: int
    """Most tokens of one request, prompt and output together: what fits the context and the engine's memory."""


class SequenceProgress(Protocol):
    """How far an engine is with a request. Any thread may read it, also after the request was removed."""

    @property
    def id(self) -> str:
        """The request's id."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was found and not computed."""

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV the engine has."""

    @property
    def num_pending_tokens(self) -> int:
        """Tokens so far whose KV is still to be computed; 1 while decoding."""

    @property
    def num_retained_blocks(self) -> int:
        """Blocks that outlive others since it was finished."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its blocks, or for others: it is not computed now, and not done."""

    @property
    def prompt_logprobs(self) -> Sequence[Logprobs]:
        """Those of the prompt's second token, its third, and so on; all of them once a token was sampled."""


class SampledToken(Protocol):
    """A token that a step sampled."""

    @property
    def seq(self) -> SequenceProgress:
        """The request that it belongs to."""

    @property
    def token_id(self) -> int:
        """The token."""

    @property
    def logprobs(self) -> Logprobs | None:
        """None unless the request asks for them."""

    @property
    def is_grammar_ended(self) -> bool:
        """Whether the request's grammar has ended with this token."""


@dataclass(frozen=True)
class Loaded:
    """The blocks of a request that could be found are in the engine's memory: it computes the rest from now on."""

    context: Any
    """The caller's context, as it was given with the request."""
    num_blocks: int
    """Blocks of the prompt."""
    num_pool_blocks: int
    """Blocks that the engine's memory had already."""
    num_tier_blocks: int
    """Blocks that were read from a store."""
    num_retained_blocks: int
    """Blocks of these that a retention of this worker has kept."""
    started_s: float
    finished_s: float


@dataclass(frozen=True)
class Stored:
    """The blocks that a job waits for can be read by other workers, or could not be written."""

    context: Any
    """The caller's context, as it was given with the request."""
    num_blocks: int
    started_s: float
    finished_s: float


@dataclass(frozen=True)
class Outcome:
    """How a request ends: with an answer, or with an error."""

    finish_reason: FinishReason
    error: RequestError | None = None
    is_final: bool = True
    """Whether another attempt would come to the same. If not, the request is tried again, as often as it may fail."""
    usage: Usage | None = None
    """The tokens that a server has counted that was asked, if it tells."""
    stop: str | None = None
    """The stop string that ended the answer, if that server tells."""
    vectors: Vectors | None = None
    """What was computed of the request's texts, if it has any."""
    end_event: EndEvent | None = None
    """The log's end, once this worker has written it."""

    @classmethod
    def of_error(cls, error: RequestError, *, is_final: bool = True) -> Self:
        """Return the outcome of a request that ends with an error, or was cancelled."""
        return cls("cancelled" if isinstance(error, Cancelled) else "error", error, is_final)

    @classmethod
    def of_texts(cls, request: "TextRequest") -> Self:
        """Return the outcome of a request whose texts are computed: an error where there are no numbers."""
        try:
            return cls("stop", usage=request.usage, vectors=request.pack_vectors())
        except ModelError as error:
            return cls.of_error(error)


@dataclass(frozen=True)
class Ended:
    """An answer ended behind the tokens that steps gave of it, without a token that says so: a server said it."""

    context: Any
    """The caller's context, as it was given with the request."""
    outcome: Outcome


EngineEvent = Loaded | Stored | Ended


StepShare = tuple[SequenceProgress, Stage, float]
"""A row of a step: its request, the stage whose work it was, and its part of the step's seconds, from 0 to 1."""


class TokenSource(Protocol):
    """An engine as a worker's loop sees it. Its role hands it the requests."""

    def has_work(self) -> bool:
        """Return whether there are requests that it could compute, or computes. Those whose blocks are being loaded
        are not.
        """

    def remove_request(self, request_id: str) -> None:
        """Drop a request, wherever it is. Its tokens do not come from `finish_step` any more, nor do its events. Does
        nothing where there is none of that id.
        """

    # The step

    def begin_step(self) -> bool:
        """Begin a step. Return whether there is anything to compute: if not, nothing is to be finished.

        Requests may be removed before the step is finished.
        """

    def finish_step(self) -> Sequence[SampledToken]:
        """Finish the step that was begun. Return what it sampled: none, one or several tokens of each request, those of
        one request in their order.

        Raises `SequenceFailed` once it is known that one request makes steps fail; the caller removes that request. The
        others are as if there had been no such step.
        """

    @property
    def step_shares(self) -> Sequence[StepShare]:
        """What each row of the last finished step took of it; all together 1. Empty where the step computed nothing
        here, as where servers are asked.
        """

    def store_full_blocks(self) -> bool:
        """Begin to store the blocks that became full. Return whether there are any.

        Workers call it when the step's tokens are on their way, so that no reader waits for it.
        """

    # What becomes of requests and their KV

    def collect_events(self) -> Iterable[EngineEvent]:
        """Yield what happened to requests, and have what was loaded computed. All of it is to be read."""

    def is_moving_blocks(self) -> bool:
        """Return whether blocks are on their way, or events were not collected yet."""

    def wait_for_event(self) -> None:
        """Wait a moment at most for something to collect, or for `wake_waiter`."""

    def wake_waiter(self) -> None:
        """End the current `wait_for_event`, or else the next one. Any thread may call this."""

    def report_state(self) -> dict[str, object]:
        """Return fields of the heartbeat: waiting requests, blocks of the memory and of the stores, drafts. Any thread
        may call it.
        """

    # The end of a worker. The model stays, and another worker may go on with the engine.

    def close(self) -> None:
        """Write the blocks that jobs wait for, and drop everything else."""

    def abandon(self) -> None:
        """Drop everything: no job may be settled any more."""


class InferenceEngine(TokenSource, Protocol):
    """One model, the memory for its KV, and the requests that it computes."""

    @property
    def model(self) -> ModelCard:
        """The model."""

    @property
    def limits(self) -> EngineLimits:
        """How much it takes."""

    def free_capacity(self, priority_class: PriorityClass, num_tokens: int) -> int:
        """Return how many more requests of a class, of `num_tokens` tokens each, would run soon if they were added."""

    def count_waiting_tokens(self, priority_class: PriorityClass, max_tokens: int) -> int:
        """Return the prompt tokens of requests of this class and those above it that are waiting.

        At most `max_tokens` of each request count.
        """

    def hash_prompt(
        self, tenant: str, token_ids: Sequence[int], spans: "Sequence[Span]" = (), adapter: str = ""
    ) -> "PromptBlocks":
        """Return the names of the blocks of a tenant's prompt, in which spans stand for pictures.

        `adapter` is the digest of the adapter that computes it; empty for the model alone.
        """

    def make_pictures(
        self,
        tenant: str,
        token_ids: Sequence[int],
        pictures: "Sequence[PromptPicture]",
        read: "Callable[[PromptPicture], Pixels]",
    ) -> "Pictures":
        """Return the pictures of a tenant's prompt.

        Where KV of one is to be computed, the engine has the model see what `read` returns, which is called on a
        thread. Raises `InvalidRequest` where the prompt has not all of their rows.
        """

    def add_request(self, request: "EngineSequence") -> None:
        """Load what the stores have of a request's blocks, then compute it. It has its `blocks`, by `hash_prompt`.

        Raises `PromptTooLong` for one that can never run, and `InvalidRequest` for unknown token ids.
        """

    def add_texts(self, request: "TextRequest", tenant: str, weight: float, *, is_suspect: bool = False) -> None:
        """Compute the vectors of a request's texts; an `Ended` tells that all are there. Raises as `add_request`."""

    def lease_request(self, request_id: str, owner: str) -> None:
        """Lease the blocks of a request to a job, those that are stored and those that will be: another worker goes on
        with it.
        """

    def finish_request(self, request_id: str, *, ends_in_call: bool = False) -> "Future[float] | None":
        """Remove a request that is through, and store what is not stored of it. Let its blocks outlive others for a
        while, where it asks for that (`retain_s`) or its answer `ends_in_call`.

        Returns a future, None where nothing had to be stored. It resolves to the time at which the blocks are written,
        or cannot be: a job that they are leased to may go out then. It never resolves after `abandon`.
        """

    def release_leases(self, owner: str, blocks: "PromptBlocks") -> None:
        """End a job's leases on the blocks that were handed over with it."""

    def prefill_tokens_per_s(self) -> float | None:
        """Return how many prompt tokens were computed per second lately, or None. Any thread may call it."""

    def report_speed(self) -> WorkerSpeed | None:
        """Return how long prompts and answers take now; None where that is not known. Any thread may call it."""
