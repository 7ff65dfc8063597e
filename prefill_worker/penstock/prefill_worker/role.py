"""Requests: a prompt is computed, with one token, and handed off. An `auto` worker decodes it (`staying_role.py`).

The numbered steps, as in docs/structure.md (the loop is `penstock.worker.worker`):

    2  a message is decoded, and read once it is claimed: its template, tokens and grammar; a request that cannot be
       answered ends, and goes on at 5
    3  its prompt is computed
    4  token 0 is sampled
    5  the job reference is published for decode, at a later token too where the worker decodes. A prefill worker does
       that also for requests that ended here
    7  an `auto` worker decodes the answer here, where its `StayPolicy` says so. Then its own message is bound,
       as it is where the log has the end already
    8  it ends
    9  the result is published, with the request's own message

What a crash costs: between 4 and 5, and in 7, nothing is bound, so any worker that reads requests goes on at the log's
end. After 8 the message that is bound settles; where the holder had no delivery, that is the first job claimed then.
"""

import hashlib
import logging
from collections.abc import Collection
from dataclasses import replace
from functools import partial

from opentelemetry.context import Context

from penstock.bus.contract import Delivery, Outgoing
from penstock.engine.contract import InferenceEngine, Outcome, SampledToken
from penstock.engine.text.template_process import TakesTime
from penstock.engine.vectors import TextRequest
from penstock.errors import (
    REFUSED_TEXTS,
    ContentErased,
    InternalError,
    InvalidRequest,
    RequestError,
    TenantKeyMissing,
    is_failure,
)
from penstock.grammar.tools import begin_in_answer
from penstock.messages import (
    DEFAULT_MAX_TOKENS,
    EndEvent,
    Job,
    Request,
    Sampling,
    TokenEvent,
    compute_body_hash,
    decode_message,
    extract_request_id,
    now_s,
)
from penstock.names import Pipeline, PriorityClass, Stage, WorkerKind
from penstock.prefill_worker.backpressure import DecodeBackpressure
from penstock.prefill_worker.handoff import build_end_event, build_job, build_job_message, rename_job
from penstock.prefill_worker.tokenize import PromptTokenizer
from penstock.telemetry import tracing
from penstock.telemetry.stage import StageMetrics
from penstock.telemetry.tracing import get_operation
from penstock.worker.failure import UNWRITABLE, make_dead_letters, to_request_error
from penstock.worker.jobs import identify_job
from penstock.worker.load import TaskLoad, WorkerLoad
from penstock.worker.model_role import ModelRole
from penstock.worker.pictures import TaskPictures
from penstock.worker.result import build_failed_result, build_result_of_log
from penstock.worker.task import StageOutput, Task

log = logging.getLogger(__name__)

MAX_INLINE_BYTES = 8192
"""The loop itself reads messages up to this size, in at most two milliseconds: another thread could cost the request a
step of the engine.
"""
MAX_WAITING_STEPS = 4
"""Prompt tokens for this many of the engine's largest steps may wait beside those that are being computed. A prompt
counts for at most half of that: while one long prompt waits, short ones are still taken, which the scheduler lets pass.
"""


class PrefillRole(ModelRole):
    """The role of a prefill worker."""

    kind: WorkerKind = "prefill"
    stage: Stage = "prefill"
    max_inline_bytes = MAX_INLINE_BYTES
    hands_off_for = "prefill"
    sender = ""
    """The worker's name in `JobNeed`."""

    def __init__(
        self,
        pipeline: Pipeline,
        engine: InferenceEngine,
        backpressure: DecodeBackpressure | None = None,
        served_name: str = "",
    ) -> None:
        """`backpressure` knows whether decode has enough batch work; without it, batch requests are always admitted."""
        super().__init__(pipeline, engine, served_name)
        self.backpressure = backpressure
        self.prompt_reader = PromptTokenizer(engine.model, self.model_name, self.adapters.is_known)

    # 2. Claim.

    def identify_request(self, delivery: Delivery) -> Task | None:
        """Return the request of a message, with an error if it is invalid; None where not even an id can be read.

        The message may be a job that decode gave back.
        """
        if self.pipeline.find_stage(delivery.topic) == "decode":
            return identify_job(self.pipeline, delivery)
        started_s = now_s()
        try:
            request = decode_message(Request, delivery.value)
            body = compute_body_hash(request, delivery.value, delivery.headers)
            task = Task(request.id, delivery, request, get_operation(request), body, delivery.name, started_s=started_s)
            return self._set_context(task)
        except RequestError as refused:
            outcome = Outcome.of_error(refused)
        except TenantKeyMissing:  # since the worker looked for its key: the message waits
            raise
        except BaseException as bug:  # this request's, not its neighbours'
            if not is_failure(bug):
                raise
            log.exception("decoding a message of %s failed", delivery.topic)
            outcome = Outcome.of_error(to_request_error(bug), is_final=False)
        request_id = extract_request_id(delivery.value, delivery.key)
        if request_id is None:
            return None
        body = "" if isinstance(outcome.error, ContentErased) else hashlib.sha256(delivery.value).hexdigest()
        unread, name = get_operation(None), delivery.name
        task = Task(request_id, delivery, None, unread, body, name, outcome=outcome, started_s=started_s)
        return self._set_context(task)

    def _set_context(self, task: Task) -> Task:
        delivery, whose = task.delivery, tracing.with_request(self.pipeline, task.id, Context())
        task.context = task.parent_context = tracing.extract_context(delivery.headers, whose, delivery.timestamp_s)
        return task

    def read_request(self, task: Task, *, may_wait: bool) -> bool:
        """Tokenize the prompt, and check and compile the grammar. Return False for a chat whose rendering takes time,
        unless this `may_wait`.
        """
        request = task.message
        assert request is not None, "what cannot be decoded has ended"
        if isinstance(request, Job):
            self.read_job(task, request)
            return True
        if request.pictures and not may_wait:
            return False
        if request.priority_class not in (None, task.priority_class):
            raise InvalidRequest(f"class {request.priority_class!r} in the topic of class {task.priority_class!r}")
        try:
            if request.texts is not None:
                self.prompt_reader.check_model(request)
                if self._asks_for_adapter(request):
                    raise InvalidRequest(REFUSED_TEXTS)
                task.seq, task.read_s = self.read_texts(task), now_s()
                return True
            if task.log_events and task.log_events[0].adapter is not None:
                self.adapters.check_begun(task, request.model)
            is_raw = task.claim.is_read_raw
            add_rows = None if self.pictures is None else partial(self._add_rows, task, request, self.pictures)
            task.token_ids = self.prompt_reader.tokenize_prompt(
                request, may_wait=may_wait, is_raw=is_raw, add_rows=add_rows
            )
        except TakesTime:
            return False
        if self._asks_for_adapter(request):
            task.adapter = self.adapters.find_version(task, request.model)
        if (grammar := request.sampling.grammar) is not None:
            start = self.prompt_reader.find_answer_start(task.token_ids) if grammar.kind == "tools" else ""
            checked = self.grammars.check_grammar(begin_in_answer(grammar, start))
            task.grammar = self.grammars.compile_grammar(checked)
            sampling = request.sampling.model_copy(update={"grammar": checked})
            task.message = request.model_copy(update={"sampling": sampling})
        task.read_s = now_s()
        return True

    def _asks_for_adapter(self, request: Request) -> bool:
        """Return whether a request that was read names an adapter, and not the model."""
        return request.model not in (None, self.model_name, self.engine.model.name)

    def _add_rows(self, task: Task, request: Request, pictures: TaskPictures, token_ids: list[int]) -> list[int]:
        """Read the pictures of a chat, and return its tokens with their rows."""
        found, task.pictures = pictures.read_request(request, token_ids)
        return found

    # 3. Compute.

    def begin_request(self, task: Task, load: WorkerLoad) -> bool:
        """Have the engine compute the prompt, and sample the first token or the whole answer.

        Return False where the log's last token ends the answer, and it is decoded here.
        """
        request = task.message
        assert request is not None
        if isinstance(task.seq, TextRequest):
            self.add_texts(task, task.seq, load)
            if isinstance(request, Request):
                load.count_chars(request, task.seq.num_prompt_tokens)
            return True
        if isinstance(request, Request) and self._asks_for_adapter(request) and task.adapter is None:
            self.adapters.check_task(task)
            raise self.adapters.build_unknown_error(request.model or "")
        # With a token in the log, an earlier attempt has computed them.
        num_prompt_logprobs = request.sampling.prompt_logprobs if task.claim.num_tokens == 0 else None
        start = self.prompt_reader.find_answer_start(task.token_ids) if request.sampling.special_text else ""
        if not self.add_to_engine(task, request.seed, load, start, num_prompt_logprobs):
            return False
        if isinstance(request, Request) and task.pictures is None:
            load.count_chars(request, len(task.token_ids))
        if self.backpressure is not None and task.priority_class == "batch":
            self.backpressure.note_batch_admitted()
        if task.hands_off:
            # One that may fill the context is not expected to: it would make all that waits look endless.
            assert task.message is not None
            sampling = task.message.sampling
            expected = min(sampling.max_tokens, DEFAULT_MAX_TOKENS) if sampling.fit_context else sampling.max_tokens
            load.mean_output_tokens[task.priority_class].add(expected)
        return True

    def free_capacity(
        self, priority_class: PriorityClass, tasks: Collection[Task], num_read: int, load: WorkerLoad
    ) -> int:
        """Return how many more requests of a class to take.

        None of batch while decode has enough of it. Otherwise as many as can be computed in some steps together with
        those that wait: other workers may have time for the rest.
        """
        if priority_class == "batch" and self.backpressure is not None and self.backpressure.is_active:
            return 0
        limits = self.engine.limits
        mean_tokens, max_requests = load.estimate_admission(priority_class, limits.max_batch - len(tasks) - num_read)
        max_waiting_tokens = MAX_WAITING_STEPS * limits.max_step_tokens
        counted_tokens = min(mean_tokens, max_waiting_tokens // 2)
        num_waiting_tokens = (
            self.engine.count_waiting_tokens(priority_class, max_waiting_tokens // 2) + num_read * counted_tokens
        )
        num_ahead = (max_waiting_tokens - num_waiting_tokens) // counted_tokens
        return min(max_requests, self.engine.free_capacity(priority_class, mean_tokens) - num_read, num_ahead)

    # 4. Append.

    def make_event(self, task: Task, item: SampledToken) -> TokenEvent | None:
        """Return the event of the next token; None where it is handed off, and the log has token 0 already."""
        is_first = task.claim.num_tokens == 0
        if task.hands_off and not is_first:
            return None
        event = super().make_event(task, item)
        if event is None or not is_first or task.is_in_flight:
            return event
        if task.message is None or task.message.sampling.prompt_logprobs is None:
            return event
        prompt_tokens = self.token_texts.describe_prompt(task.token_ids, item.seq.prompt_logprobs)
        return event.model_copy(update={"prompt_tokens": prompt_tokens})

    def finish_computed(self, task: Task, item: SampledToken, metrics: StageMetrics) -> bool:
        """Have the last blocks stored of a request that is handed off, which waits for them, or has ended.

        Return whether there are any that nothing waits for.
        """
        seq = item.seq
        if not task.is_prompt_counted:
            task.is_prompt_counted = True
            num_cached = seq.num_cached_tokens
            metrics.count_prompt(task.priority_class, seq.num_prompt_tokens - num_cached, num_cached)
        if task.hands_off:
            task.blocks_stored = self.engine.finish_request(task.id)
            return False
        if task.outcome is not None:
            return self.finish_answer(task)
        return False

    def record_token(self, task: Task, sent_s: float, written_s: float, metrics: StageMetrics) -> None:
        """Record that a token is in the log."""
        gap_s = task.measure_token_gap(written_s)
        if task.first_token_s or task.claim.num_found_tokens:
            metrics.record_token(gap_s, task.priority_class)
        else:
            task.first_token_s = now_s()
            metrics.record_first_token(task.operation, task.delivery.timestamp_s, task.trace_id)
            tracing.record_span("first_token", task.context, sent_s, task.first_token_s)
        if gap_s is None and task.outcome is None and not task.hands_off:
            task.start_span("decode", now_s())

    # 5. Settle.

    def build_end_event(self, task: Task) -> EndEvent:
        """Return the end of a request that ends here."""
        return build_end_event(task)

    def build_stage_output(self, task: Task) -> StageOutput | None:
        """Return the job message of a request that is handed off, also of one that ended. Otherwise return the result
        of its log, or None where Redis lost the record between the claim and the reading.
        """
        if not task.hands_off:
            sampling = Sampling() if task.message is None else task.message.sampling
            told = Job(
                id=task.id, job=task.name, priority_class=task.priority_class, tenant=task.tenant, sampling=sampling
            )
            return build_result_of_log(self.pipeline, task, told, self.model_name)
        if isinstance(task.message, Job):  # it is decode's again, with the same job
            return StageOutput([], [], {"cause": "pictures"})
        job = build_job(task, self.engine.model.fingerprint)
        context = tracing.with_span(task.settling_span, task.parent_context)
        block_size = 0 if task.blocks is None else task.blocks.hasher.block_size
        outputs = [build_job_message(self.pipeline, job, task, context, block_size, self.sender)]
        dead_letters = make_dead_letters(self.pipeline, task.delivery, task.error, task.claim)
        return StageOutput(outputs, dead_letters, {"job": job.job, "cause": task.leaving_for}, rename_job)

    def build_failed_output(self, task: Task) -> Outgoing:
        """Return a job with an error alone, with which decode ends the request; where it is not handed off, an error
        result.
        """
        if not task.hands_off:
            return build_failed_result(self.pipeline, task.id, task.tenant, task.delivery)
        bare = Task(task.id, task.delivery, None, task.operation, outcome=Outcome.of_error(InternalError(UNWRITABLE)))
        bare.started_s, bare.delivery = 0.0, replace(task.delivery, timestamp_s=0.0)
        return build_job_message(self.pipeline, build_job(bare, ""), task, Context())

    # For the heartbeat.

    def count_done(self, sampled: Collection[SampledToken]) -> int:
        """Return the tokens of prompts that are computed."""
        return sum(item.seq.num_prompt_tokens for item in sampled)

    def measure_task_load(self, task: Task) -> TaskLoad:
        """Return the work that a request still needs, for the heartbeat."""
        seq, message = task.seq, task.message
        left = 0 if seq is None else max(0, seq.num_prompt_tokens - seq.num_computed_tokens)
        if message is None or isinstance(seq, TextRequest):
            return TaskLoad(task.priority_class, task.is_running, left, 0)
        num_generated = 0 if task.hands_off else task.claim.num_tokens
        num_left = max(0, message.sampling.max_tokens - num_generated)
        is_in_place, is_open = num_generated > 0, message.sampling.fit_context
        return TaskLoad(
            task.priority_class,
            task.is_running,
            left,
            num_left,
            num_generated if is_open else None,
            is_in_place=is_in_place,
        )

    def report_rates(self, load: WorkerLoad) -> dict[str, object]:
        """Return how fast prompts are computed, for the heartbeat."""
        rates = [
            rate for rate in (load.throughput.tokens_per_s, self.engine.prefill_tokens_per_s()) if rate is not None
        ]
        told = super().report_rates(load)
        return {"speed": told["speed"], "prompt_tokens_per_s": max(rates, default=None)}
