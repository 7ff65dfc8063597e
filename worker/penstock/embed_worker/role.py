"""Requests of which vectors or scores are computed: these are the end of their logs, and results go out. There is one
stage.

The numbered steps, as in docs/structure.md (the loop is `penstock.worker.worker`, the engine `engine.py`):

    1  a message is read and claimed, and its texts become tokens. A request that cannot be answered goes on at 4
    2  its texts are computed, in batches with those of others
    3  nothing: there are no tokens of an answer
    4  usage, timings and the vectors are appended, as the log's end
    5  the result is published

A crash before 4 costs what was computed of the request: the next holder computes it again, to the same numbers where
its batches are alike, and else to numbers that differ by rounding alone. Nobody has seen the first. After 4 the next
holder only settles, with the vectors in the log.
"""

from collections.abc import Collection

from penstock.bus.contract import MAX_MESSAGE_BYTES
from penstock.embed_worker.engine import EmbedEngine, EmbedSequence
from penstock.embed_worker.model import EmbedModel
from penstock.engine.contract import SampledToken
from penstock.errors import REFUSED_PROMPTS, InvalidRequest
from penstock.failpoints import failpoint
from penstock.messages import EmbedOptions, Request, TokenEvent, Usage
from penstock.names import Pipeline, PriorityClass, WorkerKind
from penstock.telemetry.stage import StageMetrics
from penstock.worker.failure import is_suspect
from penstock.worker.load import TaskLoad, WorkerLoad
from penstock.worker.task import Task
from penstock.worker.whole_role import WholeRole, request_of
from penstock.worker_speed import WorkerSpeed

MAX_INLINE_BYTES = 8192
"""The loop itself reads messages up to this size, in a few milliseconds."""


class EmbedRole(WholeRole):
    """The role of an embed worker."""

    kind: WorkerKind = "embed"
    max_inline_bytes = min(MAX_INLINE_BYTES, MAX_MESSAGE_BYTES)
    writes_pieces = False
    engine: EmbedEngine

    def __init__(
        self, pipeline: Pipeline, model_name: str, model: EmbedModel, engine: EmbedEngine, source: str = ""
    ) -> None:
        """`model_name` is the name by which callers ask for the model, and `source` its directory or hub name."""
        self.pipeline, self.model_name, self.engine = pipeline, model_name, engine
        self._model, self._source = model, source or model_name

    # 1. Claim.

    def free_capacity(
        self, priority_class: PriorityClass, tasks: Collection[Task], num_read: int, load: WorkerLoad
    ) -> int:
        """Return how many more requests fill the next batches."""
        mean_tokens, most = load.estimate_admission(priority_class, self.engine.count_free(priority_class, 1.0))
        return min(most, self.engine.count_free(priority_class, mean_tokens)) - num_read

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names by which callers may ask for the model."""
        return (self.model_name, self._source)

    def check_request(self, request: Request) -> None:
        """Raise `InvalidRequest` for a request of which no vectors can be computed."""
        if request.texts is None:
            raise InvalidRequest(REFUSED_PROMPTS)

    def read_request(self, task: Task, *, may_wait: bool) -> bool:
        """Read the texts' tokens. Return True."""
        request = request_of(task)
        options = request.embed or EmbedOptions()
        rows = self._model.read_texts(request.texts or (), options)
        task.seq = EmbedSequence(
            task.id, rows, options, task.priority_class, task, is_alone=is_suspect(task.claim)
        )  # fmt: skip
        return True

    # 2. Compute.

    def begin_request(self, task: Task, load: WorkerLoad) -> bool:
        """Have the texts computed. Return True."""
        assert isinstance(task.seq, EmbedSequence)
        num_tokens = task.seq.num_prompt_tokens
        load.mean_prompt_tokens[task.priority_class].add(num_tokens)
        load.count_chars(request_of(task), num_tokens)
        self.engine.add_request(task.seq)
        failpoint("endpoint.2.asked")
        return True

    # 3. Append.

    def make_event(self, task: Task, item: SampledToken) -> TokenEvent | None:
        """Return None: there are no tokens."""
        return None

    def record_token(self, task: Task, sent_s: float, written_s: float, metrics: StageMetrics) -> None:
        """Do nothing: there are no tokens."""

    # 4. End.

    def count_usage(self, task: Task) -> Usage:
        """Return the tokens of the texts, once they are computed."""
        outcome = task.outcome
        return Usage() if outcome is None or outcome.usage is None else outcome.usage

    # For the heartbeat.

    def count_done(self, sampled: Collection[SampledToken]) -> int:
        """Return 0: there are no tokens of answers."""
        return 0

    def measure_task_load(self, task: Task) -> TaskLoad:
        """Return the tokens that are still to be computed."""
        left = 0 if task.seq is None else task.seq.num_pending_tokens
        return TaskLoad(task.priority_class, task.is_running, left, 0)

    def report_rates(self, load: WorkerLoad) -> dict[str, object]:
        """Return how fast texts are computed, for the heartbeat. Producers and other workers share work by `speed`."""
        rate = self.engine.tokens_per_s
        speed = None if rate is None else WorkerSpeed(1 / rate, 1 / rate, 0).as_json()
        return {"speed": speed, "prompt_tokens_per_s": rate, "output_tokens_per_s": None}
