"""The loop of a worker: requests come in, tokens go to their logs, and jobs or results go out.

One loop serves four roles (`role.py` in `prefill_worker/`, `decode_worker/`, `endpoint_worker/` and `embed_worker/`): a
role reads messages, hands requests to its engine, and builds what is written and published of them. A worker that
serves both stages has a role for requests and one for jobs, over one engine. A request is one `Task` from its message
to its settlement. The intake (`intake.py`) polls, identifies and claims messages; the loop opens the requests that it
returns.
The work of other threads (blocks loaded and stored, messages read, deliveries settled) comes back as events that the
loop collects: it alone touches tasks, record, session and metrics. The loop knows an engine by its contract
(`TokenSource` in `penstock.engine.contract`): the engine moves the blocks' bytes itself.

The steps of a turn, numbered as in the life of a request (docs/structure.md), prefill's and decode's. A request that
is decoded where it was read goes from 4 to 7, and has no 5 and 6. The steps of endpoint and embed workers are
those of decode, with the claim of a request in place of a job's:

    1, 6  claim     poll messages while there is capacity; those of a stage are claimed in one round trip: epoch+1 in
                    Redis, a job is bound if nothing is, and the log of what was begun is read. Then each message is
                    read. A request that cannot be answered ends here, and goes on at 5 or 9
    3, 6  load      the blocks that the KV store has are fetched while others are computed
    3, 7  step      the engine computes: parts of prompts, and a token for each sequence that has its prompt, or
                    several that it has guessed. Blocks that became full go to the KV store, some at once
    4, 7  append    the tokens go to their logs in one round trip. Decode's travel while the next steps are computed;
                    a hand-off waits for its token's. The blocks of its last chunk follow it
    8     end       finish reason, usage and timings are appended. A request's own message is bound with it, if its
                    delivery is here
    5, 9  settle    finished requests are settled. A hand-off waits until decode can read all its blocks, which are
                    leased to the request: job reference out, then the request is done, then the record says that it is
                    handed off. An end: result out, job or request done, together; the leases on its blocks end

What a crash costs: before 4, the next attempt finds the blocks that were stored. After 4 or in 7, the next holder finds
the tokens in the log and goes on at its end: logged tokens are never sampled again. After 8, it only settles, with the
message that is bound, or where none is, with a job, which is published again. A crash inside 9 leaves either nothing or
all of it. Inside 5, once the job is out, the next attempt hands the request off again, under another name, or decodes
it: one of its messages is bound, and the others are stale. Leases that nobody ends run out.
"""

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import redis
from opentelemetry.trace import SpanKind

from penstock.bus.contract import Delivery, Member, Settlement, find_size_error
from penstock.engine.contract import Ended, Loaded, Outcome, SampledToken, Stored
from penstock.errors import (
    AttemptsExhausted,
    Cancelled,
    ContentErased,
    GrammarFailed,
    InternalError,
    PictureGone,
    PicturesNeeded,
    RequestError,
    SequenceFailed,
    StoreUnreachable,
    TenantKeyMissing,
)
from penstock.failpoints import failpoint, stage_failpoint
from penstock.messages import TokenEvent, now_s
from penstock.names import CLASSES, STAGES, Pipeline, PriorityClass, Stage, find_shared_topic
from penstock.record import (
    AppendOutcome,
    Claim,
    ClaimEvent,
    Record,
    ShardedSession,
)
from penstock.sealing import find_sealer, has_key_of
from penstock.telemetry import catalog, tracing
from penstock.telemetry.meters import Meters
from penstock.telemetry.seconds import Work
from penstock.telemetry.stage import StageMetrics
from penstock.telemetry.tracing import build_attributes
from penstock.worker.delivery_queue import IDLE_POLL_S, deserialize_delivery
from penstock.worker.failure import (
    MAX_ATTEMPTS_BEFORE_SUSPECT,
    OUTAGE_DEFERRAL_S,
    UNWRITABLE,
    RetryPolicy,
    build_fixed_end,
    build_writable_dead_letter,
    build_writable_end,
    confine_error,
    deadline_error,
    is_suspect,
    reason_to_end,
    try_for_request,
)
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.intake import KEY_DEFERRAL_S, SETTLING_DEFERRAL_S, Intake
from penstock.worker.load import WorkerLoad
from penstock.worker.message_reader import may_have_grammar
from penstock.worker.settler import Settler, Settling
from penstock.worker.task import Role, StageOutput, Task
from penstock.worker.watch import LoopWatch

log = logging.getLogger(__name__)

BUSY_POLL_S = 0.01
"""How long an idle worker polls for messages while loads, stores or settlements are under way."""
MAX_UNCONFIRMED_S = 1.0
"""How long steps go on without an answer to a token that was sent, where Redis answers in its usual time."""
NEAR_ANSWER_S = 0.005
"""How long a step waits for the answers to the tokens of the one before, where those to earlier ones have come. A short
step would outrun a Redis that is near: requests would end, and make room, later by one step or more.
"""


class _SentToken(NamedTuple):
    """A token that was sent to its log."""

    task: Task
    sent_s: float
    """The time of day."""
    at_s: float
    """By the monotonic clock."""


class Worker:
    """A worker of one kind: its roles and engine, its record, and its place in its consumer groups."""

    def __init__(
        self,
        role: Role,
        pipeline: Pipeline,
        name: str,
        record: Record,
        member: Member,
        metrics: StageMetrics | None = None,
        beat: Heartbeat | None = None,
        job_role: Role | None = None,
    ) -> None:
        """`job_role` treats jobs where the worker reads both requests and jobs; `role` treats all other messages."""
        self.role, self.stage, self.pipeline, self.name = role, role.stage, pipeline, name
        self.engine, self.record, self.member = role.engine, record, member
        self.metrics = metrics or StageMetrics(Meters(is_on=False), pipeline.name, role.kind, name, "")
        self.watch = LoopWatch() if beat is None else beat.watch
        self.session = ShardedSession(
            record,
            name,
            list_partitions=member.list_partitions,
            renew_membership=member.build_renewal,
            is_stalled=self.watch.is_stalled,
            keep=None if beat is None else beat.keep_session,
        )
        self.settler, self.load = Settler(member, pipeline, self.engine.wake_waiter), WorkerLoad()
        self.running: dict[str, Task] = {}
        """All claimed requests that are not through with this stage, by request id."""
        self.intake = Intake(
            role, job_role, pipeline, record, member, self.session, self.settler, self.metrics, self.load, self.watch,
            self.running,
        )  # fmt: skip
        self.retry_policy = RetryPolicy(record, self.intake.queue, self.metrics.count_retry)
        self._opened: list[tuple[Task, bool]] = []
        """Claimed requests that are begun in this turn, and whether they are to be read before."""
        self._handing_off: set[Task] = set()
        """Requests whose hand-off is being settled."""
        self._in_flight: deque[_SentToken] = deque()
        """The tokens that are on their way to their logs."""
        self._shares: list[tuple[Work, float]] = []
        """What the last step was computed for, and the part of its seconds."""
        self._preempted: list[Task] = []
        """Requests with tokens that wait since the step was begun: their blocks went to others."""

    def run_once(self, *, accept: bool = True) -> bool:
        """Run one turn of the loop. Returns whether it did anything. Without `accept` no new requests are taken."""
        self.watch.note_turn()
        num_polled = self._claim(accept=accept)
        has_run, sampled, failed = self._compute()
        self._confirm_tokens(waits=not has_run)
        self._hand_off_preempted()
        self._end(failed)
        self._append(sampled)
        if not has_run:
            if self._is_idle():
                self.check_integrity()
            else:
                self.engine.wait_for_event()
        self.metrics.seconds.divide_seconds(self._shares)
        return bool(num_polled or sampled)

    # Events of other threads.

    def _handle_claim_news(self) -> None:
        """Drop requests whose claims were lost, and end those that were cancelled."""
        self.settler.raise_failure()
        self.intake.rescuer.run_once()
        for claim, event in self.session.collect_events():
            task = self.running.get(claim.id)
            if task is None or task.claim is not claim:
                continue
            with self._confine(task):
                if event is ClaimEvent.LOST:
                    self._drop_lost_task(task)
                elif not task.is_in_flight:  # else its token is refused
                    self._end_with(task, Outcome.of_error(Cancelled("the request was cancelled")))

    def _collect_engine_events(self) -> None:
        """Handle what the engine has loaded, stored and ended."""
        for event in self.engine.collect_events():
            match event:
                case Loaded():
                    with confine_error(event.context.id):
                        self._record_load(event.context, event)
                case Stored(task, num_blocks, begun_s, ended_s):
                    with confine_error(task.id):
                        tracing.record_span("kv.write", task.context, begun_s, ended_s, blocks=num_blocks)
                        self.metrics.record_move(catalog.KV_WRITE, begun_s, ended_s, task.trace_id)
                case Ended(task, outcome):
                    with self._confine(task):
                        self._end_told(task, outcome)

    def _collect_events(self) -> list[Task]:
        """Handle what other threads have loaded, stored, settled and read. Returns requests that are to be claimed."""
        self._collect_engine_events()
        self._finish_settled(self.settler.collect())
        identified = []
        for reading in self.intake.reader.collect_read():
            if reading.opened is not None:
                with self._confine(reading.opened):
                    reading.task.result()
                    self._resume_read_request(reading.opened)
            elif (claim := reading.claim) is None:
                identified += self.intake.accept_identified(reading)
            else:
                with self.intake.confine_claim(claim):
                    self._open_claimed(self.intake.resume_request(reading.delivery, reading.task.result(), claim))
        self.intake.release_late()
        return identified

    # 1 and 6. Claim.

    def _claim(self, *, accept: bool) -> int:
        """Collect what happened meanwhile, then claim requests: free ones, those that were identified on the reader's
        thread, and newly polled ones. Return how many messages were polled.
        """
        self._handle_claim_news()
        identified = self._collect_events()
        self._take_over(accept=accept)
        deliveries = self._poll_messages(is_idle=not identified and self._is_idle()) if accept else []
        if claimed := [*identified, *self.intake.identify_messages(deliveries)]:
            for task in self.intake.claim_messages(claimed):
                self._open_claimed(task)
            self._read_opened()
            self._collect_engine_events()  # where nothing was to be loaded the next step has their prompts
        return len(deliveries)

    def _take_over(self, *, accept: bool) -> None:
        """Take over requests that no worker holds, and begin them."""
        for stage in self.intake.stages if accept else ():
            for taken in self.intake.take_over(stage):
                with self.intake.confine_claim(taken.claim):
                    delivery = deserialize_delivery(taken.message) if has_key_of(taken.message) else None
                    if delivery is not None and has_key_of(delivery.value):
                        self._begin_taken(delivery, taken.claim)
                    else:
                        self.record.release_claim(taken.claim, delivered=False, wait_s=KEY_DEFERRAL_S)
        self._read_opened()

    def _begin_taken(self, delivery: Delivery, claim: Claim) -> None:
        """Identify the message of a request that was taken over, and open the request."""
        if not self.intake.is_long(delivery):
            self._open_claimed(self.intake.resume_request(delivery, self.intake.identify_message(delivery), claim))
        # On the thread it may wait behind a request whose reading never ends, and end with the worker.
        elif claim.attempts < 2 or not self._defer_suspect(delivery, claim):
            self.session.add_claim(claim)
            self.intake.reader.submit(delivery, claim)

    def _poll_messages(self, *, is_idle: bool) -> list[Delivery]:
        """Return the deliveries to begin. An idle worker waits for the first one, not for long where others settle or
        move blocks.
        """
        is_waited_for = len(self.settler) > 0 or self.engine.is_moving_blocks()
        found = self.intake.poll_messages(is_idle=is_idle, wait_s=BUSY_POLL_S if is_waited_for else IDLE_POLL_S)
        if is_idle:
            self.metrics.seconds.divide_seconds()
        return found

    def _is_idle(self) -> bool:
        """Return whether there is nothing to do but wait for messages."""
        return not self.running and not len(self.intake.reader)

    def _confine(self, task: Task) -> confine_error:
        """Return the block in which an exception ends a claimed request."""
        return confine_error(task.id, partial(self._end_failed, task))

    def _open_claimed(self, task: Task) -> None:
        """Open a claimed request; where that fails it ends."""
        with self._confine(task):
            self._open_task(task, task.claim)

    def _open_task(self, task: Task, claim: Claim) -> None:
        """Begin the work on a claimed request, which is read once all that were claimed with it are open: those that
        are to run apart are released by then, and lose no attempt where one of the others ends the worker.
        """
        if not self._replace_older_task(task):
            return
        if not self._find_sealer(task, claim):
            self.session.remove_claim(claim)
            self.record.release_claim(claim, delivered=task.delivery.is_held, wait_s=KEY_DEFERRAL_S)
            self.intake.await_key(task.delivery)
            return
        if claim.damage and claim.lock != "erased":
            raise InternalError(claim.damage)
        task.log_events = [event for event in claim.log if isinstance(event, TokenEvent)]
        self._record_queue_wait(task)
        is_over = claim.is_ended or reason_to_end(claim, task.deadline, self.session.server_now_s()) is not None
        if (
            not is_over
            and (task.outcome is None or not task.outcome.is_final)
            and claim.attempts > 1
            and self._defer_suspect(task.delivery, claim)
        ):
            return
        # A request that is over may be one that ends workers: it is read only if its log proves that it was read once.
        self._opened.append((task, task.outcome is None and (claim.num_tokens > 0 or not is_over)))

    def _find_sealer(self, task: Task, claim: Claim) -> bool:
        """Find what encrypts a request's log. Return False where a key of its tenant is not here yet. Where one was
        dropped, the request has its outcome.
        """
        try:
            claim.sealer = find_sealer("event", task.tenant, claim.id)
            if claim.lock == "erased":
                raise ContentErased(f"the answer was encrypted with a key that was dropped: {claim.id}")
        except TenantKeyMissing:
            return False
        except RequestError as error:
            task.outcome = Outcome.of_error(error)
        return claim.lock != "missing"

    def _read_opened(self) -> None:
        """Read requests under their claims, and begin them. The thread reads requests that take time."""
        while self._opened:
            task, is_to_be_read = self._opened.pop(0)
            with self._confine(task):
                if is_to_be_read:
                    takes_time = self.intake.is_long(task.delivery) or may_have_grammar(task.delivery.value)
                    if takes_time or not self.intake.read_request(task, may_wait=False):
                        self.session.add_claim(task.claim)
                        self.intake.reader.submit_opened(task)
                        continue
                if self._replace_older_task(task):
                    self._begin_request(task)

    def _resume_read_request(self, task: Task) -> None:
        """Go on with a claimed request that was read on the thread."""
        if task.delivery.is_held and not self.member.is_holding(task.delivery):
            task.delivery = replace(task.delivery, is_held=False)
        if self._replace_older_task(task):
            self._begin_request(task)

    def _begin_request(self, task: Task) -> None:
        """Hand a claimed request that was read to the engine, or end it."""
        claim = task.claim
        if task.read_s:
            with confine_error(task.id):
                self.metrics.record_preprocess(task.read_s - task.started_s)
                bytes_read = len(task.delivery.value)
                tracing.record_span("preprocess", task.parent_context, task.started_s, task.read_s, bytes=bytes_read)
        if claim.is_ended:
            self.session.remove_claim(claim)
            if isinstance(task.error, StoreUnreachable) and task.error.is_outage:
                # Only its message could not be read, and the log has its end.
                self.intake.queue.defer(task.delivery, OUTAGE_DEFERRAL_S)
                return
            task.leaving_for = "ended" if claim.is_unbound else ""
            self._complete_task(task, now_s())
            return
        cause, found = reason_to_end(claim, task.deadline, self.session.server_now_s()), task.outcome
        if cause is not None and found is None:
            task.outcome = Outcome.of_error(cause)
        elif cause is not None and found is not None and not found.is_final:
            # Attempts at which the message could not be read have lost no worker.
            is_last = isinstance(cause, AttemptsExhausted)
            task.outcome = replace(found, is_final=True) if is_last else Outcome.of_error(cause)
        task.start_span(task.role.kind, task.read_s or task.started_s)
        stage_failpoint(task.role.kind, "decode.6.read")
        self.running[task.id] = task
        self.session.add_claim(claim)
        if task.outcome is None:
            try_for_request(task, partial(task.role.begin_request, task, self.load))
            if task.outcome is None:
                return
        assert task.outcome is not None, "what is not begun has ended"
        self._end_with(task, task.outcome)

    def _defer_suspect(self, delivery: Delivery, claim: Claim) -> bool:
        """Defer a request that was claimed before, if it has to wait because of the others here. Return whether it
        waits.
        """
        if not self.retry_policy.defer_suspect(delivery, claim, has_to_wait=self._has_to_run_apart(claim)):
            return False
        self.session.remove_claim(claim)
        return True

    def _has_to_run_apart(self, claim: Claim) -> bool:
        """Return whether a suspect request has to wait because of the others that are here or being handed off.

        A request that may kill the worker and one that was claimed in vain before do not run in one worker: whichever
        kills it, the other would lose an attempt.
        """
        num_tries = 2 if is_suspect(claim) else MAX_ATTEMPTS_BEFORE_SUSPECT + 1
        opened = [task for task, _ in self._opened]
        here = {task.claim for task in (*self.running.values(), *self._handing_off, *opened)}
        others = (here | self.intake.reader.claims) - {claim}
        return any(one.attempts_in_vain >= num_tries for one in others)

    def _record_queue_wait(self, task: Task) -> None:
        """Record how long a message waited.

        A request that was taken over has no wait of its own, as another worker had it meanwhile.
        """
        delivery, begun_s = task.delivery, task.started_s
        if delivery.is_held:
            self.metrics.record_queue_wait(delivery.priority_class, delivery.timestamp_s, begun_s)
        name = "queue.wait" if delivery.is_held else "taken_over"
        tracing.record_span(name, task.parent_context, delivery.timestamp_s, begun_s, topic=delivery.topic)

    def _replace_older_task(self, task: Task) -> bool:
        """Drop the older task of a request that was held until the session ended and is claimed anew now. Return False
        where this task is the older one, and is dropped: its request was claimed anew while its message was read.

        The older delivery is deferred if the new one is another. If the new task has none, it keeps the older one's.
        """
        older = self.running.get(task.id)
        if older is None:
            return True
        if older.claim.epoch > task.claim.epoch:
            self.session.remove_claim(task.claim)
            self.intake.queue.defer(task.delivery)
            return False
        self._remove_task(older)
        if not task.delivery.is_held and older.is_same_request(task):
            task.delivery = older.delivery
        elif older.delivery.address != task.delivery.address:
            self.intake.queue.defer(older.delivery)
        return True

    # 3 and 6. Load.

    def _record_load(self, task: Task, loaded: Loaded) -> None:
        """Record that the blocks that were found are in the pool: the engine computes the request from now on."""
        stage_failpoint(task.role.kind, "prefill.3.fetched", "decode.6.fetched")
        found = {"blocks": loaded.num_blocks, "held": loaded.num_pool_blocks, "found": loaded.num_tier_blocks}
        if loaded.num_retained_blocks:
            found["retained"] = loaded.num_retained_blocks
        tracing.record_span("kv.read", task.context, loaded.started_s, loaded.finished_s, **found)
        if loaded.num_tier_blocks:
            self.metrics.record_move(catalog.KV_READ, loaded.started_s, loaded.finished_s, task.trace_id)
        if self.running.get(task.id) is task:
            task.role.note_loaded(task, loaded)

    # 3 and 7. Step.

    def _compute(self) -> tuple[bool, list[SampledToken], SequenceFailed | None]:
        """Run the engine's next step.

        Return whether there was a step, the tokens that it sampled, and the sequence that made it fail.
        """
        begun_s = time.monotonic()
        has_begun = self.engine.begin_step()
        # Here, and not after the step: one that failed may have taken blocks, too, which the next step gives back.
        self._preempted = [
            task
            for task in self.running.values()
            if task.last_written_s is not None and task.seq is not None and task.seq.is_waiting
        ]
        if not has_begun:
            self._shares = []
            return False, [], None
        sampled, failed = list[SampledToken](), None
        try:
            sampled += self.engine.finish_step()
        except SequenceFailed as error:
            failed = error
        self._shares = [
            (task.works[stage], share)
            for seq, stage, share in self.engine.step_shares
            if (task := self.running.get(seq.id)) is not None
        ]
        self.watch.note_step(begun_s)
        stage_failpoint(self.role.kind, "prefill.3.stepped", "decode.7.stepped")
        return True, sampled, failed

    def _fail_task(self, failed: SequenceFailed) -> None:
        """Retry or end the request that makes engine steps fail. Tokens of the last step are in its log by now."""
        task = self.running.get(failed.seq.id)
        if task is None or task.seq is not failed.seq:
            return
        if isinstance(failed.error, PicturesNeeded) and task.role.gives_back(task):
            self._remove_task(task)
            self.record.note_all_handed_off([task.claim])
            self.intake.queue.defer(task.delivery)
            return
        # A grammar's failure depends on the tokens alone: another attempt would fail too.
        is_final = isinstance(failed.error, GrammarFailed | PictureGone)
        self._end_with(task, Outcome.of_error(failed.error, is_final=is_final))

    # 4 and 7. Append.

    def _append(self, sampled: Sequence[SampledToken]) -> None:
        """Send each token to its log, and have the blocks stored that became full.

        The answers are read after the next step, as many as have come, if there is one and no hand-off waits for them.
        """
        is_storing = self._send_tokens(sampled)
        if self.engine.store_full_blocks() or is_storing:
            stage_failpoint(self.role.kind, "prefill.3.shipping", "decode.7.shipping")
        if not self.engine.has_work() or any(one.task.hands_off for one in self._in_flight):
            self._confirm_tokens()
        is_busy = any(not task.num_texts for task in self.running.values())  # those have no tokens of answers
        self.load.throughput.record_step(self.role.count_done(sampled), is_busy=is_busy)

    def _send_tokens(self, sampled: Sequence[SampledToken]) -> bool:
        """Send each token to its log, in one round trip. Tokens behind the end of an answer are dropped.

        The store of a request's last blocks begins after it. Returns whether blocks are stored that nothing waits for.
        """
        is_storing = False
        mine = [(task, item) for item in sampled if (task := self._find_sampled_task(item)) is not None]
        entries: list[tuple[Claim, TokenEvent]] = []
        failed: dict[Task, RequestError] = {}
        sent_s, at_s = now_s(), time.monotonic()
        for task, item in mine:
            if task not in failed and task.outcome is None:
                with confine_error(task.id, partial(failed.__setitem__, task)):
                    if (event := self._make_event(task, item)) is not None:
                        entries.append((task.claim, event))
                        self._in_flight.append(_SentToken(task, sent_s, at_s))
        if entries:
            self.record.send_tokens(entries)
            stage_failpoint(self.role.kind, "prefill.4.sent", "decode.7.sent")
        for task, item in dict(mine).items():
            if task in failed:
                task.outcome = Outcome.of_error(failed[task])
                if not task.is_in_flight:  # else once the tokens before are in the log
                    self._end_tasks(task)
                continue
            was_counted = task.is_prompt_counted
            is_storing |= task.role.finish_computed(task, item, self.metrics)
            if task.is_prompt_counted and not was_counted:
                num_computed = item.seq.num_prompt_tokens - item.seq.num_cached_tokens
                self.load.mean_computed_tokens[task.priority_class].add(num_computed)
            if not task.is_in_flight:  # the log has its token already
                task.first_token_s = task.started_s  # not later than this
                self._hand_off(task)
        return is_storing

    def _find_sampled_task(self, item: SampledToken) -> Task | None:
        """Return the request that a sampled token belongs to, or None if it is not running any more."""
        task = self.running.get(item.seq.id)
        return task if task is not None and task.seq is item.seq else None

    def _make_event(self, task: Task, item: SampledToken) -> TokenEvent | None:
        """Return the log event of a request's next token; None where the log has it already."""
        event = task.role.make_event(task, item)
        if event is not None:
            event.check_writable()
            task.log_events.append(event)
            task.num_in_flight += 1
        return event

    def _read_outcomes(self, *, waits: bool) -> dict[Task, tuple[float, list[AppendOutcome]]]:
        """Return the outcomes of tokens that were sent, and when the first one was, for each request."""
        found: dict[Task, tuple[float, list[AppendOutcome]]] = {}
        outcomes = self.record.collect_outcomes(waits=waits)
        left = next(islice(self._in_flight, len(outcomes), None), None)
        if left and left.at_s == self._in_flight[-1].at_s and self.record.wait_for_outcome(NEAR_ANSWER_S):
            outcomes += self.record.collect_outcomes()
        for outcome in outcomes:
            sent = self._in_flight.popleft()
            found.setdefault(sent.task, (sent.sent_s, []))[1].append(outcome)
            sent.task.num_in_flight -= 1
        return found

    def _confirm_tokens(self, *, waits: bool = True) -> None:
        """Read whether the tokens that were sent were appended, and act on the answers: on those that have come, unless
        it `waits` for all, or one is awaited for long.
        """
        if not self._in_flight:
            return
        is_late = time.monotonic() > self._in_flight[0].at_s + self.record.pace.stretch(MAX_UNCONFIRMED_S)
        by_task, written_s, ended = self._read_outcomes(waits=waits or is_late), time.monotonic(), []
        for task, (sent_s, found) in by_task.items():
            stage_failpoint(task.role.kind, "prefill.4.appended", "decode.7.confirmed", "endpoint.3.appended")
            if task is not self.running.get(task.id):
                continue
            if AppendOutcome.FENCED in found:
                self._drop_lost_task(task)
                continue
            num_written = found.count(AppendOutcome.OK)
            with confine_error(task.id):
                for _ in range(num_written):
                    task.role.record_token(task, sent_s, written_s, self.metrics)
            if num_left := len(found) - num_written:
                del task.log_events[-num_left:]
                is_cancelled = AppendOutcome.CANCELLED in found
                error = Cancelled("the request was cancelled") if is_cancelled else InternalError(UNWRITABLE)
                task.outcome = Outcome.of_error(error)
            if task.is_in_flight:
                continue  # its later tokens, which are refused too where one of these was
            if task.outcome is not None:
                ended.append(task)
            elif task.hands_off:
                self._hand_off(task)
        self._end_tasks(*ended)

    # 8. End.

    def _end(self, failed: SequenceFailed | None) -> None:
        """End the request that makes engine steps fail, or have it tried again, and those whose deadline has passed."""
        if failed is not None:
            self._confirm_tokens()
            self._fail_task(failed)
        self._end_overdue()

    def _end_told(self, task: Task, outcome: Outcome) -> None:
        """End a request whose answer's end the engine has reported."""
        if task is self.running.get(task.id):
            task.outcome = outcome
            if outcome.vectors is not None and (usage := outcome.usage) is not None:
                num_computed = usage.prompt_tokens - usage.cached_tokens
                self.metrics.count_prompt(task.priority_class, num_computed, usage.cached_tokens)
                self.metrics.count_texts(task.priority_class, task.num_texts, usage.prompt_tokens)
                self.load.mean_computed_tokens[task.priority_class].add(num_computed)
            if not task.is_in_flight:  # else once its last tokens are in the log
                self._end_with(task, outcome)

    def _end_overdue(self) -> None:
        """End requests whose deadline has passed."""
        overdue, server_now_s = [], self.session.server_now_s()
        late = {one: found for one in self.running.values() if (found := deadline_error(one.deadline, server_now_s))}
        if late:
            self._confirm_tokens()
        for task, error in late.items():
            if task is self.running.get(task.id):
                task.outcome = Outcome.of_error(error)
                overdue.append(task)
                with confine_error(task.id):
                    task.tail_text = task.output.take_rest() if task.output is not None else ""
        self._end_tasks(*overdue)

    def _end_with(self, task: Task, outcome: Outcome) -> None:
        """End a request, or have it tried again later where that may help and it has not failed too often."""
        task.outcome = outcome
        error = None if outcome.is_final else outcome.error
        if error is not None and self.retry_policy.retry_later(task.delivery, task.claim, error):
            self._remove_task(task)
        else:
            self._end_tasks(task)

    def _end_failed(self, task: Task, error: RequestError) -> None:
        """End a claimed request at which the loop failed, also where it was not running yet."""
        self.running[task.id] = task
        self._end_with(task, Outcome.of_error(error))

    def _end_tasks(self, *tasks: Task) -> None:
        """End requests: append their ends in one round trip, and send out their results or jobs."""
        if not tasks:
            return
        begun_s, fenced = now_s(), []
        for task in tasks:
            self._remove_task(task)
            # Without its message it is not handed off: who has that settles the result.
            task.leaving_for = task.find_cause_to_leave() if task.delivery.is_held else ""
        ends = [
            (
                task.claim,
                build_writable_end(task.id, partial(task.role.build_end_event, task), self._count_pieces(task.claim)),
                task.bound_name,
            )
            for task in tasks
        ]
        for task, (claim, built, _), written in zip(tasks, ends, self.record.finish_all(ends), strict=True):
            if written is AppendOutcome.FENCED:
                fenced.append(task)
                continue
            end, outcome = built, task.outcome
            assert outcome is not None, "how it ends is known"
            if written is AppendOutcome.REFUSED and outcome.error is None:
                outcome, end = Outcome.of_error(InternalError(UNWRITABLE)), build_fixed_end(self._count_pieces(claim))
            stage_failpoint(task.role.kind, "prefill.2.ended", "decode.8.ended", "endpoint.4.ended")
            task.outcome = replace(outcome, end_event=end)
            with confine_error(task.id):
                if not task.hands_off:
                    self.load.mean_output_tokens[task.priority_class].add(end.usage.completion_tokens)
                self.metrics.record_end(task.priority_class, task.operation, end, task.trace_id)
                tracing.record_span("end", task.context, begun_s, ended_s := now_s())
                about = build_attributes(task.operation, self.role.model_name, end)
                name, since_s = f"{task.operation} {self.role.model_name}", end.timings.published or task.started_s
                tracing.record_span(name, task.parent_context, since_s, ended_s, **about)
            self._complete_task(task, begun_s)
        self._give_back(*fenced)

    def _count_pieces(self, claim: Claim) -> int | None:
        """Return how many pieces of text a log has; None where its events are tokens."""
        return claim.num_tokens if self.role.writes_pieces else None

    # 5 and 9. Settle.

    def _hand_off(self, task: Task) -> None:
        """Settle a request that is through with this stage and has not ended."""
        begun_s = now_s()
        self._remove_task(task)
        self._complete_task(task, begun_s)

    def _hand_off_preempted(self) -> None:
        """Hand off requests that leave between two tokens, as their blocks went to others."""
        preempted, self._preempted = self._preempted, []
        if preempted:
            self._confirm_tokens()
        for task in preempted:
            if task is self.running.get(task.id) and task.role.leaves_preempted(task):
                self._hand_off(task)

    def _complete_task(self, task: Task, begun_s: float) -> None:
        """Publish a request's job or result and settle its delivery.

        `begun_s`: when its last span ended, or before. The settlement's span begins there, so that a trace has no gaps.
        """
        kind = SpanKind.PRODUCER if task.hands_off else SpanKind.INTERNAL
        name = "hand_off" if task.hands_off else "settle"
        task.settling_span = tracing.start_span(name, task.parent_context, begun_s, kind)
        task.settling_since_s = begun_s
        stage_output = self._build_stage_output(task)
        if stage_output is None:
            self.intake.queue.defer(task.delivery)
            return
        if task.hands_off:
            self._handing_off.add(task)
            self.session.add_claim(task.claim)
        if task.hands_off or task.delivery.is_held:
            settlement = Settlement(task.delivery, stage_output.outputs + stage_output.dead_letters)
            task.settling_span.set_attributes(stage_output.span_attributes)
            again = None if stage_output.rename is None else partial(_rename_outputs, task.delivery, stage_output)
            self.settler.settle(settlement, task, again, task.blocks_stored)
            stage_failpoint(task.role.kind, "prefill.5.asked", "decode.9.asked", "endpoint.5.asked")
        with confine_error(task.id):
            task.role.end_leases(task)

    def _build_stage_output(self, task: Task) -> StageOutput | None:
        """Return what is published of a request: an error in fixed words where it cannot be built."""
        with confine_error(task.id):
            stage_output = task.role.build_stage_output(task)
            for message in () if stage_output is None else stage_output.outputs + stage_output.dead_letters:
                find_size_error(
                    message
                )  # raises where keys or headers cannot be encoded: the settler takes many at once
            return stage_output
        letter = build_writable_dead_letter(self.pipeline, task.delivery, f"{InternalError.code}: {UNWRITABLE}")
        return StageOutput([task.role.build_failed_output(task)], [letter], {})

    def _finish_settled(self, outcomes: Sequence[tuple[Settling, bool]]) -> None:
        """Count settled deliveries. Claims of settled hand-offs are given up, the others are released."""
        if not outcomes:
            return
        handed, left = [], []
        for settling, settled in outcomes:
            if (task := settling.task) is None:
                self.metrics.count_dead_letters(settling.num_dead_letters * settled)
                continue
            with confine_error(task.id):
                self.metrics.count_dead_letters(settling.num_dead_letters * settled)
                if settled:  # what was refused is published by another worker, whose span says so
                    task.settling_span.end()
            if not task.hands_off:
                continue
            failpoint("prefill.5.settled")
            self._handing_off.discard(task)
            self.session.remove_claim(task.claim)
            if not settled:
                left.append((task.claim, task.delivery.is_held))
                continue
            handed.append(task.claim)
            if task.outcome is None and not task.claim.is_ended:
                self.metrics.count_hand_off(task.priority_class)
                self.metrics.record_move(catalog.HAND_OFF, task.settling_since_s, now_s(), task.trace_id)
                self.load.hand_offs[task.leaving_for] += 1
        self.record.note_all_handed_off(handed)
        if handed:
            failpoint("prefill.5.handed")
        self.record.release_all(left)

    # Letting go.

    def _drop_lost_task(self, task: Task) -> None:
        """Drop a request that another worker holds now, or may hold."""
        self._remove_task(task)
        self._give_back(task)

    def _give_back(self, *tasks: Task) -> None:
        """Release refused claims and defer their deliveries.

        The release is needed where the claim is this worker's after all: its session lives on, so that no other worker
        would ever take the request over.
        """
        self.record.release_all([(task.claim, task.delivery.is_held) for task in tasks])
        for task in tasks:
            self.intake.queue.defer(task.delivery)

    def _remove_task(self, task: Task) -> None:
        """Remove a request with all that it has in the engine."""
        task.span.end()
        del self.running[task.id]
        self.session.remove_claim(task.claim)
        if task.seq is not None:
            self.engine.remove_request(task.id)

    def report_load(self) -> dict[str, object]:
        """Return what the worker holds and how fast it is, for the heartbeat. Any thread may call this."""
        tasks = list(self.running.values())
        unbegun = [*self.intake.reader.pending_deliveries(), *self.intake.queue.list_deferred()]
        here = [*(task.delivery for task in tasks), *unbegun]
        held = Counter((delivery.priority_class, self.pipeline.find_stage(delivery.topic)) for delivery in here)
        task_loads = [task.role.measure_task_load(task) for task in tasks]
        read = {stage: {priority_class: list[int]() for priority_class in CLASSES} for stage in STAGES}
        waiting: dict[Stage, Counter[PriorityClass]] = {stage: Counter() for stage in STAGES}
        for one in unbegun:
            waiting[self.pipeline.find_stage(one.topic)][one.priority_class] += 1
        for (topic, number), count in self.member.count_waiting().items():
            stage, priority_class = self.pipeline.find_stage(topic), self.pipeline.find_class(topic)
            if topic == find_shared_topic(topic):  # the bus deals out tenants' own topics as these
                read[stage][priority_class].append(number)
            waiting[stage][priority_class] += count
        load = self.load.summarize_load(
            task_loads, held, read["prefill"], waiting["prefill"], read["decode"], waiting["decode"]
        )
        return load | self.role.report_rates(self.load)

    def stop_accepting(self) -> None:
        """Take no new requests. Running ones go on under their claims.

        The bus gives their deliveries to other workers, which settle them from the log.
        """
        self.settler.wait_settled(SETTLING_DEFERRAL_S)
        self.intake.rescuer.close()
        # Otherwise others would read these messages as well, until the bus has given the partitions away.
        with contextlib.suppress(redis.RedisError):
            self.session.disown_partitions()
        self.member.stop_consuming()
        for task in self.running.values():
            if not self.member.is_holding(task.delivery):
                task.delivery = replace(task.delivery, is_held=False)

    def is_settled(self) -> bool:
        """Return whether no delivery is deferred, being read or being settled, and no KV transfer is under way."""
        parts = (self.intake.queue, self.settler, self.intake.reader)
        return not (self.engine.is_moving_blocks() or any(len(one) for one in parts))

    def check_integrity(self) -> None:
        """Check that each claim of the session has a request that runs or is handed off, or a message that is being
        read. Raise `AssertionError` where one has none: as long as this process lived, no worker would go on with its
        request.
        """
        held = {task.claim for task in (*self.running.values(), *self._handing_off)} | self.intake.reader.claims
        forgotten = sorted(claim.id for claim in self.session.claims - held)
        assert not forgotten, f"claims without a request: {', '.join(forgotten)}"

    def close(self) -> None:
        """Hand back unfinished requests and leave the group. The engine stays."""
        self._confirm_tokens()
        self._hand_back()
        self.engine.close()
        self.settler.close()
        self._finish_settled(self.settler.collect())
        self._leave_group()

    def abandon(self) -> None:
        """Drop everything, as a crash would (see `penstock.worker.loop`). The engine stays."""
        with contextlib.suppress(redis.RedisError):  # where Redis is not away, the attempts need not count
            self._hand_back()
        self.settler.abandon()
        self.engine.abandon()
        with contextlib.suppress(redis.RedisError):
            self._finish_settled(self.settler.collect())
        self._leave_group()

    def _hand_back(self) -> None:
        """Release the claims of all requests that run or are being read."""
        tasks = list(self.running.values())
        for task in tasks:
            self._remove_task(task)
        read = self.intake.reader.close()
        for claim, _ in read:
            self.session.remove_claim(claim)
        self.record.release_all([*((one.claim, one.delivery.is_held) for one in tasks), *read])

    def _leave_group(self) -> None:
        self.intake.rescuer.close()
        self.session.close()
        self.record.close()
        self.member.close()
        self.watch.note_left()


def _rename_outputs(delivery: Delivery, stage_output: StageOutput) -> Settlement:
    """Return the same hand-off under a new job name. The settler's thread calls this."""
    assert stage_output.rename is not None
    return Settlement(delivery, [*map(stage_output.rename, stage_output.outputs), *stage_output.dead_letters])
