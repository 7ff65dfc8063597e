"""The loop of an endpoint worker: requests come in, endpoints are asked, their text goes to the logs, results go out.

A request is one `EndpointTask` from its message to its settlement. Each answer is read on a thread of its own
(`answer.py`), and comes back as events that the loop collects: it alone touches tasks, record, session and metrics. In
the record a request is what a job is in decode, without prefill before it: the name of its message is bound to it.

    1  claim    poll messages while endpoints have capacity, and claim them in one round trip: epoch + 1, the message's
                name is bound, and the log is read. What cannot be answered ends here, and goes on at 5
    2  ask      each claimed request goes to the endpoint with the least to do. What is behind it in the log, if
                anything is, decides what is asked (`_ask_endpoint`)
    3  append   pieces of text that arrived go to their logs, in one round trip for all requests
    4  end      finish reason, usage and timings are appended
    5  settle   result out, message done, together

What a crash costs: before 2, nothing. After 2, the endpoint's work since the last piece in the log: the connection is
closed, and the next holder finds in the log what readers have seen. What it does then is the operator's choice
(`PENSTOCK_ENDPOINT_INTERRUPTED`): go on behind that text, begin anew if there is none, or end with an error. After 4,
it only settles. A crash inside 5 leaves either nothing or all of it.

An endpoint that fails costs the same as a crash of the worker, for the answers that were under way there. A request
that no endpoint has begun waits, for as long as its deadline allows.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import redis

from penstock.bus.contract import Delivery, Member, Outgoing, Settlement
from penstock.config.settings import EndpointSettings
from penstock.endpoint_worker.answer import Answer, AnswerEvent, Failed, Finished, Piece, Refused
from penstock.endpoint_worker.endpoints import Endpoints
from penstock.endpoint_worker.question import Question, build_question
from penstock.endpoint_worker.task import EndpointTask, read_task
from penstock.errors import (
    AnswerInterrupted,
    Cancelled,
    IdConflict,
    InternalError,
    InvalidRequest,
    ModelError,
    RequestError,
)
from penstock.failpoints import failpoint
from penstock.messages import TokenEvent, now_s
from penstock.names import CLASSES, Pipeline, PriorityClass, Stage, piece_token
from penstock.record import AppendOutcome, Bound, Busy, Claim, ClaimEvent, Conflict, Record, Sessions, UnclaimedMessage
from penstock.record.claim import GOOD_PROGRESS
from penstock.telemetry import tracing
from penstock.telemetry.genai import build_request_attributes, build_usage_attributes
from penstock.telemetry.meters import Meters
from penstock.telemetry.stage import StageMetrics
from penstock.worker.confine import (
    UNWRITABLE,
    build_failed_result,
    build_fixed_end,
    build_writable_dead_letter,
    build_writable_end,
    confine_error,
    give_up_claim,
)
from penstock.worker.delivery_queue import IDLE_POLL_S, DeliveryQueue, deserialize_delivery
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.load import TaskLoad, WorkerLoad
from penstock.worker.rescue import Rescuer
from penstock.worker.retry import deadline_error, reason_to_end, to_request_error
from penstock.worker.settler import Settler
from penstock.worker.watch import LoopWatch

log = logging.getLogger(__name__)

RECORD_STAGE: Stage = "decode"
"""In the record a request is claimed as decode claims a job."""
SETTLING_DEFERRAL_S = 0.05
"""Wait before a delivery is tried again that is being settled."""
EVENT_WAIT_S = 0.02
"""How long the loop waits for text while it works on requests: also how soon it polls for further ones."""
CLOSE_TIMEOUT_S = 2.0
"""How long a worker that leaves waits for the threads of its answers."""


class Settling(NamedTuple):
    """A settlement under way: the ticket that the settler returns with its outcome."""

    num_dead_letters: int
    task: EndpointTask | None = None
    begun_s: float = 0.0


class EndpointWorker:
    """A worker that asks endpoints: what it asks, its record, and its place in the consumer group."""

    def __init__(
        self,
        pipeline: Pipeline,
        name: str,
        model: str,
        endpoints: Endpoints,
        settings: EndpointSettings,
        record: Record,
        member: Member,
        metrics: StageMetrics | None = None,
        beat: Heartbeat | None = None,
    ) -> None:
        """`model` is the name by which callers ask for the model; `settings.model` the endpoints' name."""
        self.pipeline, self.name, self.model = pipeline, name, model
        self.endpoints, self.settings, self.record, self.member = endpoints, settings, record, member
        self.metrics = metrics or StageMetrics(Meters(is_on=False), pipeline.name, "endpoint", name, "")
        reader = member.create_orphan_reader()
        self.watch = LoopWatch() if beat is None else beat.watch
        self.session = Sessions(
            record,
            RECORD_STAGE,
            name,
            member.list_partitions,
            renew_membership=member.build_renewal,
            is_stalled=self.watch.is_stalled,
            keep=None if beat is None else beat.keep_session,
        )
        self._wake = threading.Event()
        self._events: queue.SimpleQueue[tuple[Answer, AnswerEvent]] = queue.SimpleQueue()
        self.settler, self.queue, self.load = (
            Settler(member, pipeline, self._wake.set), DeliveryQueue(member), WorkerLoad()
        )  # fmt: skip
        for mean in self.load.mean_prompt_tokens.values():
            mean.add(0.0)
        self._read_task = partial(read_task, pipeline, model)
        self.rescuer = Rescuer(record, RECORD_STAGE, self.session, member, reader, self.make_claim_request)
        self.running: dict[str, EndpointTask] = {}
        """All claimed requests that have not ended, by request id."""
        self._by_answer: dict[Answer, EndpointTask] = {}
        self._cut: list[Answer] = []
        """Answers that are not wanted any more, whose threads may still run."""

    def run_once(self, *, accept: bool = True) -> bool:
        """Run one turn of the loop. Returns whether it did anything. Without `accept` no new requests are taken."""
        self.watch.note_turn()
        self._handle_claim_news()
        self._finish_settled(self.settler.collect())
        if accept:
            self._take_over()
        deliveries = self._poll_messages() if accept else []
        self._claim_messages(deliveries)
        self._end_overdue()
        self._ask_endpoints()
        has_news = self._handle_answers()
        if self.running and not has_news:
            self._wake.wait(EVENT_WAIT_S)
        return bool(deliveries) or has_news

    # What happened meanwhile.

    def _handle_claim_news(self) -> None:
        """Drop requests whose claims were lost, and end those that were cancelled."""
        self.settler.raise_failure()
        self.rescuer.run_once()
        for claim, news in self.session.collect_events():
            task = self.running.get(claim.id)
            if task is None or task.claim is not claim:
                continue
            with self._confine(task):
                if news is ClaimEvent.LOST:
                    self._drop_lost_task(task)
                else:
                    self._end_with_error(task, Cancelled("the request was cancelled"))

    # 1. Claim.

    def free_capacity(self) -> int:
        """Return how many more requests can be asked for now."""
        num_waiting = sum(task.answer is None for task in self.running.values())
        return max(0, self.endpoints.count_free() - num_waiting)

    def _poll_messages(self) -> list[Delivery]:
        """Return the deliveries to begin. An idle worker waits for the first one."""
        capacity = self.free_capacity()
        self.load.capacities = dict.fromkeys(CLASSES, capacity)
        wait_s = EVENT_WAIT_S if len(self.settler) else IDLE_POLL_S
        deliveries = self.queue.poll(capacity, is_idle=not self.running, wait_s=wait_s)
        for _ in deliveries:
            failpoint("endpoint.1.polled")
        return deliveries

    def make_claim_request(self, delivery: Delivery) -> UnclaimedMessage | None:
        """Return what a claim needs to know of a message that no worker has begun; None where it cannot be put down.

        Any thread may call this.
        """
        task = self._read_task(delivery)
        waiting = None if task is None else task.to_claim_request()
        return waiting if waiting is not None and waiting.message else None

    def _claim_messages(self, deliveries: Iterable[Delivery]) -> None:
        """Claim all requests that this worker may claim, in one round trip."""
        asked: list[tuple[EndpointTask, UnclaimedMessage]] = []
        for delivery in deliveries:
            if not self._is_claimable(delivery):
                continue
            where, end = f"at {delivery.position} of {delivery.topic}", partial(self._send_error_letter, delivery)
            with confine_error(where, end):
                if (task := self._read_task(delivery)) is None:
                    raise InvalidRequest("no request id can be read, in the message or its key")
                asked.append((task, task.to_claim_request()))
        claims = self.record.claim_all(RECORD_STAGE, self.session.id, [message for _, message in asked])
        for (task, _), claimed in zip(asked, claims, strict=True):
            match claimed:
                case Busy() if (running := self._find_undelivered_task(task)) is not None:
                    running.delivery = task.delivery
                case Busy(wait_s=wait_s):
                    self.queue.defer(task.delivery, wait_s)
                case Bound():
                    self.settler.settle(Settlement(task.delivery), Settling(0))
                case Conflict():
                    error = IdConflict(f"the id {task.id!r} belongs to a request with another body")
                    self._send_error_letter(task.delivery, error)
                case Claim():
                    failpoint("endpoint.1.claimed")
                    task.claim = claimed
                    with self._confine(task):
                        self._open_task(task, claimed)

    def _confine(self, task: EndpointTask) -> confine_error:
        """Return the block in which an exception ends a claimed request."""
        return confine_error(task.id, partial(self._end_failed, task))

    def _is_claimable(self, delivery: Delivery) -> bool:
        """Return whether the delivery is still this worker's and is not being settled."""
        if self.settler.is_settling(delivery):
            self.queue.defer(delivery, SETTLING_DEFERRAL_S)
            return False
        return self.member.is_holding(delivery)

    def _find_undelivered_task(self, task: EndpointTask) -> EndpointTask | None:
        """Return the running request of this message if it was taken over, and so has no delivery of its own."""
        running = self.running.get(task.id)
        is_it = running is not None and not running.delivery.is_held and running.message_name == task.message_name
        return running if is_it else None

    def _take_over(self) -> None:
        """Take over requests that no worker holds. Their deliveries are with other workers, or come later.

        They have waited for longer than what is polled, which gets the capacity that they leave.
        """
        capacity = self.free_capacity() if self.session.num_free else 0
        if capacity <= 0:
            return
        taken = self.record.take_over_free(RECORD_STAGE, self.session.id, capacity)
        self.session.num_free = self.session.num_free - capacity if len(taken) == capacity else 0
        for claimed in taken:
            self.metrics.count_take_over()
            with confine_error(claimed.claim.id, partial(self._give_up_claim, claimed.claim)):
                task = self._read_task(deserialize_delivery(claimed.message))
                assert task is not None, "a message without an id cannot be claimed"
                failpoint("endpoint.1.taken")
                task.claim = claimed.claim
                with self._confine(task):
                    self._open_task(task, claimed.claim)

    def _give_up_claim(self, claim: Claim, error: RequestError) -> None:
        """Give up a claim whose message this worker cannot read."""
        self.session.remove_claim(claim)
        give_up_claim(self.record, claim, error, claim.num_tokens)

    def _open_task(self, task: EndpointTask, claim: Claim) -> None:
        """Begin the work on a claimed request. A request that cannot be answered ends here."""
        if claim.damage:
            raise InternalError(claim.damage)
        task.claim, task.log_events = claim, [event for event in claim.log if isinstance(event, TokenEvent)]
        self._record_queue_wait(task)
        self._replace_older_task(task)
        if claim.is_ended:
            self._complete_task(task, now_s())
            return
        task.start_span()
        task.span.set_attributes(build_request_attributes(task.operation, self.model))
        self.running[task.id] = task
        self.session.add_claim(claim)
        error = task.error or reason_to_end(claim, task.deadline, self.session.server_now_s())
        if error is None and claim.attempts > 1 and self.settings.interrupted == "fail":
            error = AnswerInterrupted("its worker was lost, and may have asked for it")
        if error is not None:
            self._end_with_error(task, error)

    def _record_queue_wait(self, task: EndpointTask) -> None:
        delivery = task.delivery
        if delivery.is_held:
            self.metrics.record_queue_wait(delivery.klass, delivery.timestamp_s, task.started_s)
        name = "queue.wait" if delivery.is_held else "taken_over"
        tracing.record_span(name, task.parent_context, delivery.timestamp_s, task.started_s, topic=delivery.topic)

    def _replace_older_task(self, task: EndpointTask) -> None:
        """Drop the older task of a request that was held until the session ended and is claimed anew now."""
        older = self.running.get(task.id)
        if older is None:
            return
        self._remove_task(older)
        if not task.delivery.is_held and older.message_name == task.message_name:
            task.delivery = older.delivery
        elif older.message_name != task.message_name:
            self.queue.defer(older.delivery)

    # 2. Ask.

    def _ask_endpoints(self) -> None:
        """Ask for all requests that wait, as far as endpoints can be asked: interactive ones first."""
        waiting = [task for task in self.running.values() if task.answer is None]
        for task in sorted(waiting, key=lambda one: CLASSES.index(one.klass)):
            endpoint = self.endpoints.choose()
            if endpoint is None:
                return
            try:
                question = self._build_question(task)
            except RequestError as error:
                self._end_with_error(task, error)
                continue
            except Exception as error:  # a bug is this request's, not its neighbours'
                log.exception("request %s", task.id)
                self._end_with_error(task, to_request_error(error))
                continue
            if question is None:
                task.finish_reason = "length"
                self._end_tasks(task)
                continue
            endpoint.num_running += 1
            task.num_pieces_before = len(task.log_events)
            answer = Answer(endpoint, question, self.settings.key, self.settings.silence_s, self._report_event)
            task.answer, self._by_answer[answer] = answer, task
            failpoint("endpoint.2.asked")

    def _build_question(self, task: EndpointTask) -> Question | None:
        """Return what to ask; None where the text so far is as long as the answer may be.

        Raises `AnswerInterrupted` where the log has text that is not to be, or cannot be, gone on with.
        """
        assert task.request is not None, "what cannot be read has ended"
        if task.log_events and self.settings.interrupted != "continue":
            raise AnswerInterrupted("it was cut when readers had seen a part of it")
        if task.max_pieces_left <= 0:
            return None
        return build_question(task.request, self.settings.model, task.text, len(task.log_events))

    def _report_event(self, answer: Answer, event: AnswerEvent) -> None:
        """Hand over an event. An answer's thread calls this."""
        self._events.put((answer, event))
        self._wake.set()

    # 3. Append.

    def _handle_answers(self) -> bool:
        """Append the text that has arrived, then handle the ends of answers. Returns whether anything arrived."""
        self._wake.clear()
        arrived = []
        with contextlib.suppress(queue.Empty):
            while True:
                arrived.append(self._events.get_nowait())
        self._append_pieces([(answer, event) for answer, event in arrived if isinstance(event, Piece)])
        for answer, event in arrived:
            if isinstance(event, Piece):
                continue
            task = self._by_answer.get(answer)
            self._forget_answer(answer)
            if task is not None:
                with self._confine(task):
                    self._handle_answer_end(task, answer, event)
        self._cut = [answer for answer in self._cut if answer.is_alive]
        return bool(arrived)

    def _append_pieces(self, pieces: Iterable[tuple[Answer, Piece]]) -> None:
        """Append pieces of text, in one round trip, and act on the outcomes. What is behind `max_tokens` is dropped."""
        entries, overlong, failed = self._make_events(pieces)
        if entries:
            self._write_events(entries)
        for task, error in failed.items():
            if task is self.running.get(task.id):
                self._end_with_error(task, error)
        for task in overlong:
            if task is self.running.get(task.id):
                task.finish_reason = "length"
                self._end_tasks(task)

    def _make_events(
        self, pieces: Iterable[tuple[Answer, Piece]]
    ) -> tuple[list[tuple[EndpointTask, TokenEvent]], Iterable[EndpointTask], dict[EndpointTask, RequestError]]:
        """Return the events of pieces of text, by request, the requests whose endpoints ignore `max_tokens`, and those
        of whose pieces no event can be made, with their errors.
        """
        added: dict[EndpointTask, list[TokenEvent]] = {}
        overlong: dict[EndpointTask, None] = {}
        failed: dict[EndpointTask, RequestError] = {}
        for answer, piece in pieces:
            if (task := self._by_answer.get(answer)) is not None and task not in failed:
                events = added.setdefault(task, [])
                if len(events) >= task.max_pieces_left:
                    overlong[task] = None
                    continue
                before = events[-1] if events else None
                with confine_error(task.id, partial(failed.__setitem__, task)):
                    # This raises for what cannot be written, as it encodes the text.
                    events.append(task.claim.next_event(piece_token(piece.text), piece.text, before=before))
        return [(task, event) for task, events in added.items() for event in events], overlong, failed

    def _write_events(self, entries: Sequence[tuple[EndpointTask, TokenEvent]]) -> None:
        outcomes = self.record.append_tokens([(task.claim, event) for task, event in entries])
        written_s = time.monotonic()
        failpoint("endpoint.3.appended")
        for (task, event), outcome in zip(entries, outcomes, strict=True):
            if task is not self.running.get(task.id):
                continue
            match outcome:
                case AppendOutcome.OK:
                    task.log_events.append(event)
                    with confine_error(task.id):
                        self._record_piece(task, written_s)
                case AppendOutcome.FENCED:
                    self._drop_lost_task(task)
                case AppendOutcome.CANCELLED:
                    self._end_with_error(task, Cancelled("the request was cancelled"))
                case AppendOutcome.REFUSED:
                    self._end_with_error(task, InternalError(UNWRITABLE))
        self.load.throughput.record_step(len(entries), is_busy=bool(self.running))

    def _record_piece(self, task: EndpointTask, written_s: float) -> None:
        if len(task.log_events) - task.num_pieces_before > task.most_pieces:
            task.num_failures = 0
        if task.answer is not None:
            task.answer.endpoint.note_answer()
        gap_s = task.measure_gap(written_s)
        if len(task.log_events) > 1:
            self.metrics.record_token(gap_s)
            return
        task.first_token_s = now_s()
        self.metrics.record_first_token(task.operation, task.delivery.timestamp_s)
        tracing.record_span("first_token", task.context, task.started_s, task.first_token_s)

    # 4. End.

    def _handle_answer_end(self, task: EndpointTask, answer: Answer, event: AnswerEvent) -> None:
        task.answer = None
        match event:
            case Finished(reason, usage, stop):
                answer.endpoint.note_answer()
                task.finish_reason, task.told_usage, task.told_stop = reason, usage, stop
                self._end_tasks(task)
            case Refused(error):
                answer.endpoint.note_answer()
                self._end_with_error(task, error)
            case Failed():
                self._handle_failure(task, answer, event)

    def _handle_failure(self, task: EndpointTask, answer: Answer, failed: Failed) -> None:
        """Have a request asked for again, at whichever endpoint can be, or end it.

        It ends where the operator does not want it to be asked for again, and where endpoints have failed at it as
        often as a request may fail. That an endpoint is away or busy does not count.
        """
        endpoint, now = answer.endpoint, time.monotonic()
        log.warning("%s: %s", endpoint.url, failed.problem)
        if failed.is_busy and failed.wait_s is not None:
            endpoint.note_busy(failed.problem, failed.wait_s, now)
        else:
            endpoint.note_failure(failed.problem, answer.asked_s, now)
        self.metrics.count_retry("endpoint_busy" if failed.is_busy else "endpoint_failed")
        if not failed.may_have_begun:
            return
        task.num_failures += 1
        num_made = len(task.log_events) - task.num_pieces_before
        task.most_pieces = max(task.most_pieces, min(num_made, GOOD_PROGRESS))
        if self.settings.interrupted == "fail":
            self._end_with_error(task, AnswerInterrupted(failed.problem))
        elif task.num_failures >= self._max_failures(failed):
            self._end_with_error(task, ModelError(f"endpoints failed {task.num_failures} times: {failed.problem}"))

    def _max_failures(self, failed: Failed) -> int:
        """Return how often endpoints may fail at a request in a row: more often where the connection was lost."""
        settings = self.record.settings
        return settings.max_attempts if failed.is_lost else settings.fail_attempts

    def _end_overdue(self) -> None:
        """End requests whose deadline has passed."""
        for task in list(self.running.values()):
            if (error := deadline_error(task.deadline, self.session.server_now_s())) is not None:
                self._end_with_error(task, error)

    def _end_with_error(self, task: EndpointTask, error: RequestError) -> None:
        task.error = error
        self._end_tasks(task)

    def _end_failed(self, task: EndpointTask, error: RequestError) -> None:
        """End a claimed request at which the loop failed, also where it was not running yet."""
        self.running[task.id] = task
        self._end_with_error(task, error)

    def _end_tasks(self, *tasks: EndpointTask) -> None:
        """End requests: append their ends in one round trip, and send out their results."""
        begun_s, fenced = now_s(), []
        for task in tasks:
            self._remove_task(task)
        ends = [
            (task.claim, build_writable_end(task.id, task.build_end_event, task.claim.num_tokens)) for task in tasks
        ]
        for task, (claim, built), outcome in zip(tasks, ends, self.record.finish_all(ends), strict=True):
            if outcome is AppendOutcome.FENCED:
                fenced.append(task)
                continue
            end = built
            if outcome is AppendOutcome.REFUSED and task.error is None:
                task.error, end = InternalError(UNWRITABLE), build_fixed_end(claim.num_tokens)
            failpoint("endpoint.4.ended")
            # As it was written: with the number of pieces in the log.
            task.end_event = end.model_copy(update={"pieces": claim.num_tokens})
            with confine_error(task.id):
                self.load.mean_output_tokens[task.klass].add(end.usage.completion_tokens)
                self.metrics.record_end(task.klass, task.operation, end)
                attributes = build_usage_attributes(end.usage, end.finish_reason)
                tracing.record_span("end", task.context, begun_s, now_s(), **attributes)
            self._complete_task(task, begun_s)
        self._give_back(*fenced)

    # 5. Settle.

    def _complete_task(self, task: EndpointTask, begun_s: float) -> None:
        """Publish a request's result and settle its delivery; who took it over has none, and leaves that to others."""
        found = self._build_outputs(task)
        if found is None:
            self.queue.defer(task.delivery)
            return
        if task.delivery.is_held:
            outputs, dead_letters = found
            settling = Settling(len(dead_letters), task, begun_s)
            self.settler.settle(Settlement(task.delivery, outputs + dead_letters), settling)
            failpoint("endpoint.5.asked")

    def _build_outputs(self, task: EndpointTask) -> tuple[list[Outgoing], list[Outgoing]] | None:
        """Return the result and the dead letters of a request: an error in fixed words where they cannot be built."""
        with confine_error(task.id):
            return task.build_outputs(self.pipeline, self.model)
        tenant = "default" if task.request is None else task.request.tenant
        letter = build_writable_dead_letter(self.pipeline, task.delivery, f"{InternalError.code}: {UNWRITABLE}")
        return [build_failed_result(self.pipeline, task.id, tenant, task.delivery)], [letter]

    def _send_error_letter(self, delivery: Delivery, error: RequestError) -> None:
        """Settle a delivery with a dead letter. If the delivery was lost, its new holder does so."""
        letter = build_writable_dead_letter(self.pipeline, delivery, f"{error.code}: {error}")
        self.settler.settle(Settlement(delivery, [letter]), Settling(1))

    def _finish_settled(self, outcomes: Iterable[tuple[Settling | None, bool]]) -> None:
        """Count settled deliveries."""
        for settling, settled in outcomes:
            if settling is None:
                continue
            with confine_error("that was settled" if settling.task is None else settling.task.id):
                self.metrics.count_dead_letters(settling.num_dead_letters * settled)
                if settling.task is not None:
                    tracing.record_span("settle", settling.task.parent_context, settling.begun_s, now_s())

    # Letting go.

    def _drop_lost_task(self, task: EndpointTask) -> None:
        """Drop a request that another worker holds now, or may hold."""
        self._remove_task(task)
        self._give_back(task)

    def _give_back(self, *tasks: EndpointTask) -> None:
        """Release refused claims and defer their deliveries: the claims may be this worker's after all."""
        self.record.release_all([(task.claim, task.delivery.is_held) for task in tasks])
        for task in tasks:
            self.queue.defer(task.delivery)

    def _remove_task(self, task: EndpointTask) -> None:
        """Remove a request, and cut its answer."""
        task.span.end()
        del self.running[task.id]
        self.session.remove_claim(task.claim)
        if task.answer is not None:
            task.answer.cut()
            self._cut.append(task.answer)
            self._forget_answer(task.answer)
            task.answer = None

    def _forget_answer(self, answer: Answer) -> None:
        if self._by_answer.pop(answer, None) is not None:
            answer.endpoint.num_running -= 1

    def report_load(self) -> dict[str, object]:
        """Return what the worker holds and how fast it is, for the heartbeat. Any thread may call this.

        The endpoints' prompts count as no work: how they are computed is not known here.
        """
        loads = []
        for task in list(self.running.values()):
            fits = task.request is not None and task.request.sampling.fit_context
            num_said = len(task.log_events)
            loads.append(
                TaskLoad(
                    task.klass, task.answer is not None, 0, max(0, task.max_pieces_left), num_said if fits else None
                )
            )
        waiting: Mapping[PriorityClass, int] = {klass: self.queue.num_deferred(klass) for klass in CLASSES}
        rates = {"prompt_tokens_per_s": None, "output_tokens_per_s": self.load.throughput.tokens_per_s}
        return self.load.summarize_load(loads, waiting) | rates

    def stop_accepting(self) -> None:
        """Take no new requests. Running ones go on under their claims.

        The bus gives their deliveries to other workers, which settle them from the log.
        """
        self.settler.wait_settled(SETTLING_DEFERRAL_S)
        self.rescuer.close()
        with contextlib.suppress(redis.RedisError):
            self.session.disown_partitions()
        self.member.stop_consuming()
        for task in self.running.values():
            if not self.member.is_holding(task.delivery):
                task.delivery = replace(task.delivery, is_held=False)

    def is_settled(self) -> bool:
        """Return whether no delivery is deferred or being settled."""
        return not len(self.queue) and not len(self.settler)

    def close(self) -> None:
        """Hand back unfinished requests and leave the group."""
        self._hand_back()
        self.settler.close()
        self._finish_settled(self.settler.collect())
        self._leave_group()

    def abandon(self) -> None:
        """Drop everything, as a crash would (see `penstock.worker.loop`)."""
        with contextlib.suppress(redis.RedisError):  # where Redis is not away, the attempts need not count
            self._hand_back()
        self.settler.abandon()
        self._finish_settled(self.settler.collect())
        self._leave_group()

    def _hand_back(self) -> None:
        """Cut all answers, and release the claims of their requests."""
        tasks = list(self.running.values())
        for task in tasks:
            self._remove_task(task)
        until = time.monotonic() + CLOSE_TIMEOUT_S
        for answer in self._cut:
            answer.join(max(0.0, until - time.monotonic()))
        self.record.release_all([(task.claim, task.delivery.is_held) for task in tasks])

    def _leave_group(self) -> None:
        self.rescuer.close()
        self.session.close()
        self.record.close()
        self.member.close()
        self.watch.note_left()
