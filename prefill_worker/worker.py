"""The prefill worker: requests in; KV blocks, first tokens and job references out.

One turn of the loop, numbered as in the life of a request (docs/structure.md):

    1  poll      take deliveries while there is room
    2  claim     the message is read, a long one beside the engine's steps (reading.py); then epoch + 1 in Redis. What
                 cannot be answered ends here, and goes on at 5
    3  compute   what the KV store has of the prompt is fetched while others are computed; then it takes part in the
                 engine's steps, and full blocks go to the store as they are done
    4  emit      token 0 is appended to the log; the blocks of the last chunk follow, nobody waits for them
    5  settle    once all blocks are where decode can read them, leased to the request: job reference out, then the
                 request is done, then the record says that it is handed off

What a crash costs: after 2 or 3, the next attempt finds the blocks that were stored; after 4, it finds token 0 in the
log and keeps it, and the leases run out if nobody renews them. Inside 5, once the job is out, the next attempt hands
the request off again, under another name: decode binds one of its jobs, and the other is stale. After 5 the request is
settled without output if its message comes again.
"""

import contextlib
import logging
from collections.abc import Callable
from functools import partial

import redis

from engine.engine import Engine, Sampled
from engine.sequence import State
from engine.text import OutputState
from engine.token_text import token_texts
from kvstore.store import KVStore
from kvstore.transfers import Fetch, Ship, Transfers
from penstock import tracing
from penstock.bus.contract import Delivery, Member, Settlement
from penstock.errors import Cancelled, IdConflict, InternalError, InvalidRequest, RequestError, SequenceFailed
from penstock.failpoints import failpoint
from penstock.messages import FinishReason, TokenEvent, now_s
from penstock.names import CLASSES, Pipeline, PriorityClass
from penstock.record import AppendOutcome, Bound, Busy, Claim, Conflict, Record
from penstock.telemetry.genai import request_attributes, usage_attributes
from penstock.telemetry.stage import StageFigures
from penstock.worker import StageWorker, cause_of, cause_to_end, letters, pack, too_late
from prefill_worker.ahead import Ahead
from prefill_worker.handoff import end_of, job_of, outgoing_job
from prefill_worker.intake import Intake, read, waiting_of
from prefill_worker.prompt import Prefill, sequence_of
from prefill_worker.reading import INLINE_BYTES, Readings
from prefill_worker.tokenize import PromptReader

log = logging.getLogger(__name__)

STEPS_AHEAD = 4
"""So many steps' tokens may wait beyond what is being computed."""


class PrefillWorker(StageWorker[Prefill]):
    """One prefill worker over its engine, KV store, record and place in the group."""

    stage = "prefill"
    transfers: Transfers
    store: KVStore

    def __init__(
        self,
        pipeline: Pipeline,
        name: str,
        engine: Engine,
        store: KVStore,
        record: Record,
        member: Member,
        figures: StageFigures | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """`ahead`: whether decode has enough batch work; without, that is not asked."""
        super().__init__(pipeline, name, record, member, waiting_of, figures)
        self.engine, self.store, self.prompts = engine, store, PromptReader(engine.model)
        self.transfers = Transfers(store, engine, engine.pool.num_blocks // 8)
        self.readings = Readings(self._read, self.transfers.wake)
        self.ahead = ahead

    # The loop.

    def turn(self, *, accept: bool = True) -> bool:
        """One turn of the loop; whether it did anything."""
        self.settler.check()
        self._collect()
        self._hear()
        self._expire()
        deliveries = self._poll() if accept else []
        for delivery in deliveries:
            failpoint("prefill.1.polled")
            self._receive(delivery)
        if self.ahead is not None and any(delivery.klass == "batch" for delivery in deliveries):
            self.ahead.note()
        self._take_over(accept=accept)
        sampled = self._step()
        if self.engine.has_run:
            failpoint("prefill.3.stepped")
        firsts = [(self.running[item.seq.id], item) for item in sampled]
        self._emit(firsts)
        for prefill, _ in firsts:
            self._finish(prefill)
        self._ship_chunks()
        self.load.pace.note(sum(item.seq.num_prompt for item in sampled), is_busy=bool(self.running))
        if not self._is_idle() and not self.engine.has_run:
            self.transfers.wait()
        return bool(deliveries or sampled)

    def _is_idle(self) -> bool:
        return super()._is_idle() and not len(self.readings)

    def is_settled(self) -> bool:
        """Whether nothing waits, for a lease or for a commit, and nothing is being read."""
        return super().is_settled() and not len(self.readings)

    def _step(self) -> list[Sampled]:
        try:
            return self.engine.step()
        except SequenceFailed as failed:
            self._give_up(self.running[failed.seq.id].intake, self.running[failed.seq.id].claim, failed.error)
            return []

    def _room(self, klass: PriorityClass) -> int:
        """How many more requests of a class to take: none while some of it wait for blocks or decode has enough to do
        with batch work, and only so many that it takes some steps to compute those that wait. Others may have time for
        the rest. What is being read has its room already.
        """
        if self.transfers.is_wanting(klass) or (klass == "batch" and self.ahead is not None and self.ahead.is_enough):
            return 0
        rank, settings = CLASSES.index(klass), self.engine.settings
        before = [one.seq for one in self.running.values() if CLASSES.index(one.seq.klass) <= rank]
        num_read = sum(CLASSES.index(delivery.klass) <= rank for delivery in self.readings.deliveries())
        each, most = self.load.expected(klass, settings.max_batch - len(before) - num_read)
        num_waiting = sum(seq.num_prompt for seq in before if seq.state is State.WAITING) + num_read * each
        num_behind = (STEPS_AHEAD * settings.max_step_tokens - num_waiting) // each or not num_waiting
        return max(0, min(most, self.engine.room(klass, each) - num_read, num_behind))

    def report(self) -> dict[str, object]:
        """What it holds and how fast it is, for the heartbeat. Any thread may ask."""
        held = [one.held() for one in list(self.running.values())]
        rates = [rate for rate in (self.load.pace.tokens_per_s, self.engine.rates()) if rate is not None]
        read = [delivery.klass for delivery in self.readings.deliveries()]
        waiting = {klass: self.inbox.num_waiting(klass) + read.count(klass) for klass in CLASSES}
        return self.load.report(held, waiting) | {"prompt_tokens_per_s": max(rates, default=None)}

    def _collect(self) -> None:
        """Go on with what was fetched, with what was shipped, and with what was read."""
        for done in self.transfers.collect():
            match done:
                case Fetch():
                    self._fetched(done.ticket, done)
                case Ship():
                    self._shipped(done.ticket, done)
        for reading in self.readings.collect():
            if reading.claim is not None:
                self.session.drop(reading.claim)  # whatever comes of it adds it anew
            self._go_on(reading.delivery, reading.intake.result(), reading.claim)

    def _drop_readings(self) -> None:
        """Leave what is being read to others."""
        for claim in self.readings.close():
            self.session.drop(claim)
            self.record.release(claim, delivered=False)

    def close(self) -> None:
        """Hand back what is not finished, and leave the group."""
        self._drop_readings()
        self._collect()
        super().close()

    def abandon(self) -> None:
        """Let go of everything, as a crash would."""
        with contextlib.suppress(redis.RedisError):  # then the session runs out
            self._drop_readings()
        super().abandon()

    # 2 Claim.

    def _receive(self, delivery: Delivery, claim: Claim | None = None) -> None:
        """Read a message, and go on with it; `claim` where its request was taken over."""
        if len(delivery.value) <= INLINE_BYTES:
            self._go_on(delivery, self._read(delivery), claim)
            return
        if claim is not None:
            self.session.add(claim)
        self.readings.start(delivery, claim)

    def _read(self, delivery: Delivery) -> Intake | None:
        return read(self.pipeline, delivery, self.prompts)

    def _go_on(self, delivery: Delivery, intake: Intake | None, claim: Claim | None) -> None:
        if intake is not None:
            self.figures.preprocessed(intake.read_s - intake.started_s)
        if claim is None:
            self._admit(delivery, intake)
        elif intake is not None:
            failpoint("prefill.2.taken")
            self._begin_or_fail(intake, claim)
        else:
            self._hand_on(claim, InvalidRequest("no request id can be read, in the message or its key"))

    def _admit(self, delivery: Delivery, intake: Intake | None) -> None:
        if intake is None:
            self._bury(delivery, "invalid_request: no request id can be read, in the message or its key")
            return
        if not self._is_mine(delivery):
            return
        parcel = b"" if intake.is_too_large else pack(delivery)
        claimed = self.record.claim_prefill(intake.id, self.session.id, intake.body, parcel)
        match claimed:
            case Busy(wait_s=wait_s):
                self.inbox.put_back(delivery, wait_s)
            case Bound():
                self.settler.settle(Settlement(delivery))
            case Conflict():
                error = IdConflict(f"the id {intake.id!r} belongs to a request with another body")
                self._bury(delivery, f"{error.code}: {error}")
            case Claim():
                failpoint("prefill.2.claimed")
                self._begin_or_fail(intake, claimed)

    def _begin_or_fail(self, intake: Intake, claim: Claim) -> None:
        if isinstance(intake.error, InternalError) and not claim.ended:
            self._give_up(intake, claim, intake.error)
        else:
            self._begin(intake, claim)

    def _taken(self, delivery: Delivery, claim: Claim) -> None:
        self._receive(delivery, claim)

    def _of(self, claim: Claim) -> Prefill | None:
        prefill = super()._of(claim)
        return None if prefill is None or prefill.seq.state is State.DONE else prefill

    def _cancelled(self, task: Prefill) -> None:
        self._stop(task, Cancelled("cancelled in prefill"))

    def _expire(self) -> None:
        """End what is too late; what is computed already goes on, for decode to end it."""
        for prefill in list(self.running.values()):
            request = prefill.intake.request
            error = too_late(request.deadline if request else None)
            if error is not None and prefill.seq.state is not State.DONE:
                self._stop(prefill, error)

    def _stop(self, prefill: Prefill, error: RequestError) -> None:
        prefill.note_used()
        self._forget(prefill)
        prefill.intake.error = error
        self._end(prefill.intake, prefill.claim)

    def _begin(self, intake: Intake, claim: Claim) -> None:
        self._note_wait(intake.delivery, intake.context, intake.started_s)
        tracing.note("preprocess", intake.context, intake.started_s, intake.read_s, bytes=len(intake.delivery.value))
        if intake.error is None and intake.request is not None:
            intake.error = cause_to_end(claim, intake.request.deadline)
        if (older := self.running.get(intake.id)) is not None:  # held until its session was over, and now claimed anew
            self._forget(older)
            mine, other = intake.delivery, older.intake.delivery
            if not mine.is_held:
                intake.delivery = other
            elif other.is_held and (mine.topic, mine.position) != (other.topic, other.position):
                self.inbox.put_back(other)
        if claim.ended or intake.error is not None:
            self._end(intake, claim)
            return
        has_suspect = any(prefill.seq.suspect for prefill in self.running.values())
        if self.failures.set_aside(intake.delivery, claim, is_taken=has_suspect):
            return
        try:
            self._start(intake, claim)
        except RequestError as error:
            intake.error = error
            self._end(intake, claim)
        except Exception as error:  # a bug is this request's, not its neighbours'
            log.exception("request %s", intake.id)
            self._give_up(intake, claim, cause_of(error))

    def _give_up(self, intake: Intake, claim: Claim, error: RequestError) -> None:
        """The work on it failed: it is tried again later, or ends."""
        if (prefill := self.running.get(intake.id)) is not None:
            prefill.note_used()
            self._forget(prefill)
        if not self.failures.try_again(intake.delivery, claim, error):
            intake.error = error
            self._end(intake, claim)

    # 3 Compute.

    def _start(self, intake: Intake, claim: Claim) -> None:
        """Have the prompt's blocks fetched."""
        request = intake.request
        assert request is not None
        chain = self.store.chain(request.tenant)
        chain.extend(intake.token_ids)
        tail = chain.tail(intake.token_ids)
        intake.last_block = (tail or chain.names[-1]).key.hex()
        seq = sequence_of(intake, request, claim, [name.key for name in chain.names])
        self.engine.check(seq, request.sampling.max_tokens)
        self.load.prompts[seq.klass].note(seq.num_prompt)
        self.load.outputs[seq.klass].note(request.sampling.max_tokens)
        told = {"prompt_tokens": len(intake.token_ids), "attempt": claim.attempts}
        span = tracing.begin("prefill", intake.context, intake.read_s, **told)
        span.set_attributes(request_attributes(intake.operation, self.engine.model.name))
        names = [*chain.names, *([tail] if tail else [])]
        prefill = self.running[seq.id] = Prefill(intake, claim, seq, names, span)
        self.session.add(claim)
        to_share = (seq.num_prompt - 1) // self.store.layout.block_size  # the last token is always computed
        lease_to = self.pipeline.lease_owner(seq.id)
        self.transfers.fetch(Fetch(prefill, names[:to_share], lease_to=lease_to, klass=seq.klass))

    def _fetched(self, prefill: Prefill, fetch: Fetch) -> None:
        """What could be had is in the pool: compute the rest."""
        if prefill is not self.running.get(prefill.seq.id):
            return
        failpoint("prefill.3.fetched")
        lacks = [*fetch.lacks, *[self.store.everywhere] * (len(prefill.names) - len(fetch.lacks))]
        prefill.lacks = {index: lack for index, lack in enumerate(lacks) if lack}
        self.engine.add(prefill.seq)
        found = {"held": fetch.held, "found": len(fetch.lacks) - fetch.held}
        tracing.note("kv.read", prefill.context, fetch.begun_s, fetch.ended_s, blocks=len(prefill.names), **found)

    def _ship_chunks(self) -> None:
        """Ship the full blocks of the prompts that go on."""
        for prefill in self.running.values():
            if prefill.lacks:
                self._ship(prefill, self.engine.completed_blocks(prefill.seq))

    def _ship(self, prefill: Prefill, upto: int, then: Callable[[], None] | None = None) -> None:
        """Have the blocks before `upto` written that are not yet."""
        ready = [index for index in prefill.lacks if index < upto]
        if not ready and then is None:
            return
        blocks = [(index, prefill.names[index], prefill.lacks.pop(index)) for index in ready]
        seq, lease_to = prefill.seq, self.pipeline.lease_owner(prefill.seq.id)
        self.transfers.ship(seq, Ship(prefill, blocks, lease_to=lease_to, klass=seq.klass, then=then))
        failpoint("prefill.3.shipping")

    # 4 Emit.

    def _emit(self, firsts: list[tuple[Prefill, Sampled]]) -> None:
        """Append token 0 where the log has none yet, in one round trip."""
        events: list[tuple[Prefill, TokenEvent, FinishReason | None]] = []
        begun_s = now_s()
        for prefill, sampled in firsts:
            prefill.note_used()
            self.figures.prompt_done(prefill.seq.num_prompt - prefill.seq.num_cached, prefill.seq.num_cached)
            prefill.intake.first_token_s = prefill.intake.started_s  # where the log has one: not later than this
            if prefill.claim.num_tokens == 0:
                request = prefill.intake.request
                assert request is not None
                model = self.engine.model
                state = OutputState(model.tokenizer, request.sampling, model.eos_token_ids, request.sampling.max_tokens)
                text, finish = state.push(sampled.token_id)
                told = token_texts(model.tokenizer).fill(sampled.logprobs, sampled.token_id)
                event = prefill.claim.next_event(sampled.token_id, text, told)
                events.append((prefill, event, finish))
        outcomes = self.record.append([(prefill.claim, event) for prefill, event, _ in events])
        if events:
            failpoint("prefill.4.appended")
        for (prefill, _, finish), outcome in zip(events, outcomes, strict=True):
            prefill.intake.first_token_s = now_s() if outcome is AppendOutcome.OK else 0.0
            if outcome is AppendOutcome.OK:
                self.figures.first_token(prefill.intake.operation, prefill.delivery.timestamp_s)
                tracing.note("first_token", prefill.context, begun_s, prefill.intake.first_token_s)
            if outcome is AppendOutcome.FENCED:
                prefill.lost = True
            elif outcome is AppendOutcome.CANCELLED:
                prefill.intake.error = Cancelled("cancelled in prefill")
                prefill.lost = not self._append_end(prefill.intake, prefill.claim)
            elif finish is not None:
                prefill.lost = not self._append_end(prefill.intake, prefill.claim, finish)

    # 5 Settle.

    def _finish(self, prefill: Prefill) -> None:
        """The prompt is computed: have the last of its blocks written, and then the hand-off made, whatever the loop
        is at.
        """
        if prefill.lost:
            self._lose(prefill)
            return
        self._ship(prefill, len(prefill.names), then=partial(self._settle_job, prefill.intake, prefill.claim))
        self.engine.remove(prefill.seq)

    def _shipped(self, prefill: Prefill, ship: Ship) -> None:
        """Some of its blocks are where decode can read them, or all."""
        if ship.blocks:
            tracing.note("kv.write", prefill.context, ship.begun_s, ship.ended_s, blocks=len(ship.blocks))
        if ship.then is not None and prefill is self.running.get(prefill.seq.id):
            self._forget(prefill, keep_claim=True)

    def _settle_job(self, intake: Intake, claim: Claim) -> None:
        """On the loop's thread, or the one that wrote the last block."""
        failpoint("prefill.4.written")
        span = tracing.begin("hand_off", intake.context)
        dead = letters(self.pipeline, intake.delivery, intake.error, claim)

        def settlement() -> Settlement:
            """Under a new name: of two jobs with one name both would settle the result."""
            job = job_of(intake, self.store.layout.fingerprint)
            span.set_attribute("job", job.job)
            return Settlement(
                intake.delivery, [outgoing_job(self.pipeline, job, intake.operation, intake.context), *dead]
            )

        def done(settled: bool) -> None:
            failpoint("prefill.5.settled")
            span.end()
            self.session.drop(claim)
            if settled:
                self.figures.buried(len(dead))
                if not intake.is_ended and not claim.ended:
                    self.figures.handed_off(intake.delivery.klass)
                self.record.handed(claim)
                failpoint("prefill.5.handed")
            else:
                self.record.release(claim, delivered=intake.delivery.is_held)

        self.session.add(claim)
        self.settler.settle(settlement(), done, again=settlement)

    def _end(self, intake: Intake, claim: Claim) -> None:
        """The request ends here: append the end, then let the jobs topic carry it, so that a job settles the result."""
        if not claim.ended and not self._append_end(intake, claim):
            self._give_back(claim, intake.delivery)
            return
        failpoint("prefill.2.ended")
        self._settle_job(intake, claim)

    def _append_end(self, intake: Intake, claim: Claim, finish: FinishReason | None = None) -> bool:
        end, begun_s = end_of(intake, claim.num_tokens, finish), now_s()
        intake.is_ended = self.record.finish(claim, end)
        if intake.is_ended:
            self.figures.ended(intake.delivery.klass, intake.operation, end)
            told = usage_attributes(end.usage, end.finish_reason)
            tracing.note("end", intake.context, begun_s, now_s(), **told)
        return intake.is_ended

    def _forget(self, task: Prefill, *, keep_claim: bool = False) -> None:
        task.span.end()
        del self.running[task.seq.id]
        self.engine.remove(task.seq)
        if not keep_claim:
            self.session.drop(task.claim)
