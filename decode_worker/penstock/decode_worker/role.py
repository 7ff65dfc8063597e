"""Jobs, in workers of kind `decode` and `auto`: an answer goes on at the end of its log, and a result is published.

The numbered steps, as in docs/structure.md (the loop is `penstock.worker.worker`):

    6  a job, which its claim has bound, and its log are read; KV that is not in the store is computed again, and so are
       vectors whose log Redis has lost
    7  the answer is decoded, a token a step or several
    8  it ends
    9  the result is published
"""

import logging
from collections.abc import Collection

from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery, Outgoing
from penstock.engine.contract import SampledToken
from penstock.engine.vectors import TextRequest
from penstock.messages import EndEvent, Job, Usage, now_s
from penstock.names import PriorityClass, Stage, WorkerKind
from penstock.telemetry.stage import StageMetrics
from penstock.worker.jobs import identify_job
from penstock.worker.load import TaskLoad, WorkerLoad
from penstock.worker.model_role import ModelRole
from penstock.worker.result import build_failed_result, build_result_of_log
from penstock.worker.task import StageOutput, Task

log = logging.getLogger(__name__)

MAX_RETURNS = 100
"""How often a request goes back to prefill, for KV inside its pictures. Then it ends with `pictures_needed`."""
MAX_BATCH_ADMISSIONS = 3
"""Batch jobs admitted at once while interactive requests run. Each admission adds 1 to 2 ms to the turn."""


class DecodeRole(ModelRole):
    """The role of a worker that reads jobs."""

    kind: WorkerKind = "decode"
    stage: Stage = "decode"
    max_inline_bytes = MAX_MESSAGE_BYTES
    hands_off_for = ""

    # 6. Claim.

    def read_request(self, task: Task, *, may_wait: bool) -> bool:
        """Read the texts of a job whose log Redis has lost, or compile its grammar, if it has one. Return False for
        texts, which take time, unless this `may_wait`.
        """
        if task.num_texts:
            task.seq = self.read_texts(task) if may_wait else None
            return may_wait
        self.read_job(task, _job_of(task))
        return True

    def identify_request(self, delivery: Delivery) -> Task | None:
        """Return the request of a job, as `identify_job` does."""
        return identify_job(self.pipeline, delivery)

    def begin_request(self, task: Task, load: WorkerLoad) -> bool:
        """Have the engine go on after all tokens so far, or compute texts. Return False where the log's last token ends
        the answer.
        """
        job = _job_of(task)
        if isinstance(task.seq, TextRequest):
            self.add_texts(task, task.seq, load)
            return True
        if not self.add_to_engine(task, job.seed, load):
            return False
        if task.blocks is not None and task.blocks.last_hash != job.last_block:
            log.warning("request %s: its KV is of another model or secret; computing it again", job.id)
        return True

    def free_capacity(
        self, priority_class: PriorityClass, tasks: Collection[Task], num_read: int, load: WorkerLoad
    ) -> int:
        """Return how many more requests of a class to take.

        Few batch jobs are taken at once beside interactive requests, whose next tokens wait meanwhile.
        """
        mean_tokens, max_requests = load.estimate_admission(
            priority_class, self.engine.limits.max_batch - len(tasks) - num_read
        )
        if priority_class == "batch" and any(task.priority_class == "interactive" for task in tasks):
            max_requests = min(max_requests, MAX_BATCH_ADMISSIONS)
        return min(max_requests, self.engine.free_capacity(priority_class, mean_tokens)) if max_requests > 0 else 0

    def gives_back(self, task: Task) -> bool:
        """Return whether a request goes back to prefill, as KV inside a picture is not there, and no pixels are."""
        num_returns = task.claim.num_returns
        # A store that is away or slow would send it to and fro: from the second time on it waits before.
        waits = num_returns > 0 and task.claim.attempts_in_vain < 2
        return num_returns < MAX_RETURNS and not waits

    # 7. Append.

    def finish_computed(self, task: Task, item: SampledToken, metrics: StageMetrics) -> bool:
        """Have the last blocks of an answer stored. Return whether there are any."""
        return task.outcome is not None and self.finish_answer(task)

    def record_token(self, task: Task, sent_s: float, written_s: float, metrics: StageMetrics) -> None:
        """Record that a token is in the log."""
        metrics.record_token(task.measure_token_gap(written_s), task.priority_class)

    # 8. End.

    def build_end_event(self, task: Task) -> EndEvent:
        """Return the end of the log, stamped now."""
        job, num_tokens = _job_of(task), task.claim.num_tokens
        if task.num_texts:  # what was computed here: decode reads them where Redis has lost what prefill found
            num_prompt_tokens, num_cached_tokens = task.num_prefilled_tokens, task.num_cached_tokens
        elif job.error is None or num_tokens > 0:
            num_prompt_tokens, num_cached_tokens = len(job.token_ids), job.cached_tokens
        else:  # it was given up in prefill: its end there, which Redis lost, had the usage
            num_prompt_tokens = num_cached_tokens = 0
        usage = Usage(
            prompt_tokens=num_prompt_tokens,
            cached_tokens=num_cached_tokens,
            completion_tokens=num_tokens,
        )
        timings = job.timings.model_copy(update={"decode_started": task.started_s, "finished": now_s()})
        return EndEvent(
            finish_reason=task.finish_reason,
            stop=task.find_stop(),
            text=task.tail_text,
            usage=usage,
            timings=timings,
            error=task.wire_error,
            vectors=None if task.outcome is None else task.outcome.vectors,
        )

    # 9. Settle.

    def build_stage_output(self, task: Task) -> StageOutput | None:
        """Return the result of the log; None where Redis lost the record between the claim and the reading."""
        return build_result_of_log(self.pipeline, task, _job_of(task), self.model_name)

    def build_failed_output(self, task: Task) -> Outgoing:
        """Return an error result."""
        return build_failed_result(self.pipeline, task.id, task.tenant, task.delivery)

    def end_leases(self, task: Task) -> None:
        """End prefill's leases on the blocks of the prompt."""
        blocks = task.blocks or self.hash_prompt(task)
        self.engine.release_leases(self.pipeline.lease_owner(task.id), blocks)

    # For the heartbeat.

    def count_done(self, sampled: Collection[SampledToken]) -> int:
        """Return how many tokens of answers there were."""
        return len(sampled)

    def measure_task_load(self, task: Task) -> TaskLoad:
        """Return the work that a request still needs, for the heartbeat."""
        pending = (
            task.seq.num_pending_tokens - 1 if task.seq is not None and task.is_running else 0
        )  # else it may be stored
        sampling, num_generated = _job_of(task).sampling, task.claim.num_tokens
        left = 0 if task.num_texts else sampling.max_tokens - num_generated
        num_generated_if_open = num_generated if sampling.fit_context else None
        return TaskLoad(task.priority_class, task.is_running, max(0, pending), left, num_generated_if_open)


def _job_of(task: Task) -> Job:
    assert isinstance(task.message, Job), "a job that cannot be read has what could be"
    return task.message
