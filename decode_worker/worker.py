"""The decode worker: job references in; token streams and results out.

One turn of the loop, numbered as in the life of a request (docs/structure.md):

    6  claim     epoch + 1 in Redis, the job bound if none is; the log is read; the KV blocks are fetched while those
                 that run are stepped
    7  step      one token for each running request, appended at its position; the appends of a step travel while the
                 next one is computed. Blocks of prompt and answer that became full go to the KV store
    8  end       finish reason, usage and timings are appended
    9  settle    result out, job done, together; the leases on its blocks end

What a crash costs: after 6 or 7, the next holder reads the log and goes on at its end, logged tokens are never sampled
again; after 8, it only settles; a crash inside 9 leaves either nothing or all of it. Leases that nobody ends run out.
"""

import logging
import time
from collections.abc import Iterable

from opentelemetry.context import Context

from decode_worker.answer import Decode, read_job, waiting_of
from decode_worker.emit import Emitter
from decode_worker.result import outgoing_result, result_of
from engine.engine import Engine, Sampled
from engine.sequence import State
from engine.text import OutputState
from engine.token_text import token_texts
from kvstore.chain import Chain
from kvstore.store import KVStore
from kvstore.transfers import Fetch, Ship, Transfers
from penstock import tracing
from penstock.bus.contract import Delivery, Member, Outgoing, Settlement
from penstock.errors import Cancelled, RequestError, SequenceFailed
from penstock.failpoints import failpoint
from penstock.messages import EndEvent, Job, TokenEvent, now_s
from penstock.names import CLASSES, Pipeline, PriorityClass
from penstock.record import AppendOutcome, Bound, Busy, Claim, Record
from penstock.telemetry.genai import operation_in, request_attributes, usage_attributes
from penstock.telemetry.stage import StageFigures
from penstock.worker import StageWorker, cause_of, letters, pack, too_late

log = logging.getLogger(__name__)

AT_ONCE = 3
"""To take in a job costs a turn a millisecond or two."""


class DecodeWorker(StageWorker[Decode]):
    """One decode worker over its engine, KV store, record and place in the group."""

    stage = "decode"
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
    ) -> None:
        super().__init__(pipeline, name, record, member, waiting_of, figures)
        self.engine, self.store, self.emitter = engine, store, Emitter(record)
        self.transfers = Transfers(store, engine, engine.pool.num_blocks // 8)

    # The loop.

    def turn(self, *, accept: bool = True) -> bool:
        """One turn of the loop; whether it did anything."""
        self.settler.check()
        self._collect()
        self._hear()
        deliveries = self._poll() if accept else []
        for delivery in deliveries:
            failpoint("decode.6.polled")
            self._admit(delivery)
        self._take_over(accept=accept)
        sampled, failed = self._step()
        if self.engine.has_run:
            failpoint("decode.7.stepped")
        self._ship_full()
        self._confirm(self.emitter.collect())
        if failed is not None:
            self._fail(failed)
        self._expire()
        self._emit(sampled)
        self.load.pace.note(len(sampled), is_busy=bool(self.running))
        if self.running and not self.engine.has_run:
            self.transfers.wait()
        return bool(deliveries or sampled)

    def _room(self, klass: PriorityClass) -> int:
        """How many more jobs of a class to take: none while some of it wait for blocks, and of batch a few at once
        beside interactive ones, whose next tokens wait meanwhile.
        """
        if self.transfers.is_wanting(klass):
            return 0
        num_interactive = sum(one.delivery.klass == "interactive" for one in self.running.values())
        num_before = num_interactive if klass == "interactive" else len(self.running)
        each, most = self.load.expected(klass, self.engine.settings.max_batch - num_before)
        if klass == "batch" and num_interactive:
            most = min(most, AT_ONCE)
        return max(0, min(most, self.engine.room(klass, each))) if most > 0 else 0

    def report(self) -> dict[str, object]:
        """What it holds and how fast it is, for the heartbeat. Any thread may ask."""
        held = [one.held() for one in list(self.running.values())]
        waiting = {klass: self.inbox.num_waiting(klass) for klass in CLASSES}
        rates = {"prompt_tokens_per_s": self.engine.rates(), "output_tokens_per_s": self.load.pace.tokens_per_s}
        return self.load.report(held, waiting) | rates

    def close(self) -> None:
        """Hand back what is not finished, and leave the group."""
        self._confirm(self.emitter.collect())
        super().close()

    # 6 Claim.

    def _admit(self, delivery: Delivery) -> None:
        found = read_job(delivery)
        if found is None:
            self._bury(delivery, "invalid_request: no request id can be read, in the job or its key")
            return
        job, error = found
        if not self._is_mine(delivery):
            return
        claimed = self.record.claim_decode(job.id, self.session.id, job.job, pack(delivery))
        match claimed:
            case Busy() if (running := self._without_delivery(job)) is not None:
                running.delivery = delivery
            case Busy(wait_s=wait_s):
                self.inbox.put_back(delivery, wait_s)
            case Bound():
                self.settler.settle(Settlement(delivery))
            case Claim() if claimed.ended:
                self._settle(delivery, job, claimed.log, claimed, self.store.chain(job.tenant))
            case Claim():
                failpoint("decode.6.claimed")
                self._begin(delivery, job, claimed, error)

    def _without_delivery(self, job: Job) -> Decode | None:
        """What was taken over from the holder of this job, here."""
        running = self.running.get(job.id)
        return running if running and running.job.job == job.job and not running.delivery.is_held else None

    def _taken(self, delivery: Delivery, claim: Claim) -> None:
        failpoint("decode.6.taken")
        found = read_job(delivery)
        assert found is not None, "it was claimed by its id"
        job, error = found
        self._begin(delivery, job, claim, error)

    def _cancelled(self, task: Decode) -> None:
        if task.seq is not None and task.seq.state is State.WAITING:  # else its next token is refused
            task.error = Cancelled("cancelled before it was decoded")
            self._end(task)

    def _begin(self, delivery: Delivery, job: Job, claim: Claim, error: RequestError | None = None) -> None:
        """`error`: why there is nothing to generate, if that is known."""
        if (older := self.running.get(job.id)) is not None:  # held until its session was over, and now claimed anew
            self._forget(older)
            if older.job.job != job.job:  # Redis forgot which one was bound
                self.inbox.put_back(older.delivery)
            elif not delivery.is_held:
                delivery = older.delivery
        has_suspect = any(decoding.seq is not None and decoding.seq.suspect for decoding in self.running.values())
        if self.failures.set_aside(delivery, claim, is_taken=has_suspect):
            return
        parent, begun_s = self._context(delivery, job), now_s()
        self._note_wait(delivery, parent, begun_s)
        span = tracing.begin("decode", parent, begun_s, attempt=claim.attempts)
        span.set_attributes(request_attributes(operation_in(delivery.headers), self.engine.model.name))
        model, sampling = self.engine.model, job.sampling
        output = OutputState(model.tokenizer, sampling, model.eos_token_ids, sampling.max_tokens)
        said = [event for event in claim.log if isinstance(event, TokenEvent)]
        failpoint("decode.6.read")
        chain = self.store.chain(job.tenant)
        decoding = self.running[job.id] = Decode(delivery, job, claim, output, parent, span, said, chain)
        self.session.add(claim)
        try:
            for event in said:
                decoding.finish = output.push(event.token)[1]
            decoding.error = error or decoding.cause_to_end()
            if decoding.error is None and decoding.finish is None:
                self._fetch(decoding)
        except RequestError as refused:
            decoding.error = refused
        except Exception as failed:  # a bug is this request's, not its neighbours'
            log.exception("request %s", job.id)
            self._give_up(decoding, cause_of(failed))
            return
        if decoding.error is not None or decoding.finish is not None:
            self._end(decoding)

    def _fetch(self, decoding: Decode) -> None:
        """Have the KV blocks fetched of all tokens there are, the answer's too; what is missing is computed again."""
        job, chain, block_size = decoding.job, decoding.chain, self.store.layout.block_size
        chain.extend(job.token_ids)
        decoding.partial = chain.tail(job.token_ids)
        prompt = decoding.prompt_names()
        seq = decoding.seq = decoding.sequence()
        self.engine.check(seq)
        self.load.prompts[job.klass].note(len(seq.token_ids))
        if prompt[-1].key.hex() != job.last_block:
            log.warning("%s: its KV is of another model or secret, computing it again", job.id)
        chain.extend(seq.token_ids)
        seq.prefix_keys = [name.key for name in chain.names]
        to_share = (len(seq.token_ids) - 1) // block_size  # the last token is always computed
        wanted = chain.names[:to_share]
        self.transfers.fetch(Fetch(decoding, wanted, decoding.partial, seq.num_prompt // block_size, klass=job.klass))

    def _collect(self) -> None:
        """Go on with what was fetched."""
        for done in self.transfers.collect():
            if isinstance(done, Fetch):
                self._fetched(done.ticket, done)

    def _fetched(self, decoding: Decode, fetch: Fetch) -> None:
        """What could be had is in the pool: compute the rest, and go on from there."""
        if decoding is not self.running.get(decoding.job.id):
            return
        failpoint("decode.6.fetched")
        seq, num_found = decoding.seq, len(fetch.lacks)
        assert seq is not None
        seq.tail = fetch.tail_payload
        lacks = [*fetch.lacks, *[self.store.everywhere] * (len(decoding.chain.names) - num_found)]
        decoding.lacks = {index: lack for index, lack in enumerate(lacks) if lack}
        num_prompt = len(decoding.prompt_names())
        self.store.count_recomputed(num_prompt - num_found - (seq.tail is not None))
        self.engine.add(seq)
        found = {"held": fetch.held, "found": num_found - fetch.held + (seq.tail is not None)}
        tracing.note("kv.read", decoding.context, fetch.begun_s, fetch.ended_s, blocks=num_prompt, **found)

    # 7 Step.

    def _step(self) -> tuple[list[Sampled], SequenceFailed | None]:
        try:
            return self.engine.step(), None
        except SequenceFailed as failed:
            return [], failed

    def _fail(self, failed: SequenceFailed) -> None:
        """One request makes steps fail; what the last step said of it is in its log by now."""
        decoding = self.running.get(failed.seq.id)
        if decoding is not None and decoding.seq is failed.seq:
            self._give_up(decoding, failed.error)

    def _give_up(self, decoding: Decode, error: RequestError) -> None:
        """The work on it failed: it is tried again later, or ends."""
        if self.failures.try_again(decoding.delivery, decoding.claim, error):
            self._forget(decoding)
        else:
            decoding.error = error
            self._end(decoding)

    def _emit(self, sampled: list[Sampled]) -> None:
        entries = []
        for item in sampled:
            decoding = self.running.get(item.seq.id)
            if decoding is None or decoding.seq is not item.seq:
                continue
            text, decoding.finish = decoding.output.push(item.token_id)
            told = token_texts(self.engine.model.tokenizer).fill(item.logprobs, item.token_id)
            decoding.said.append(decoding.claim.next_event(item.token_id, text, told))
            entries.append((decoding.claim, decoding.said[-1]))
            if decoding.finish is not None:
                self.engine.remove(item.seq)
        self.emitter.send(entries)
        if entries:
            failpoint("decode.7.sent")

    def _confirm(self, outcomes: list[tuple[Claim, AppendOutcome]]) -> None:
        """Act on what became of the last step's tokens."""
        ended: list[Decode] = []
        written_s = time.monotonic()
        for claim, outcome in outcomes:
            failpoint("decode.7.confirmed")
            decoding = self._of(claim)
            if decoding is None:
                continue
            if outcome is AppendOutcome.FENCED:
                self._lose(decoding)
            elif outcome is AppendOutcome.CANCELLED:
                decoding.said.pop()
                decoding.error = Cancelled("cancelled while it was decoded")
                ended.append(decoding)
            else:
                self.figures.token(decoding.since_last(written_s))
                if decoding.finish is not None:
                    ended.append(decoding)
        self._end(*ended)

    def _expire(self) -> None:
        for decoding in list(self.running.values()):
            if (error := too_late(decoding.job.deadline)) is not None:
                decoding.error = error
                decoding.tail = decoding.output.flush()
                self._end(decoding)

    def _ship_full(self) -> None:
        """Have the blocks written that are full and that some tier lacks, those of the answer too.

        A later request that goes on with this conversation finds them, and so does a worker that takes this one over.
        """
        for decoding in self.running.values():
            seq = decoding.seq
            num_full = 0 if seq is None else self.engine.completed_blocks(seq)
            if seq is None or num_full <= decoding.num_seen:
                continue
            added = decoding.chain.extend(seq.token_ids)
            if added:
                self.engine.name_blocks(seq, [name.key for name in added])
                first = len(decoding.chain.names) - len(added)
                decoding.lacks |= {first + n: self.store.everywhere for n in range(len(added))}
            decoding.num_seen = num_full
            ready = [index for index in decoding.lacks if index < num_full]
            blocks = [(index, decoding.chain.names[index], decoding.lacks.pop(index)) for index in ready]
            if blocks:
                self.transfers.ship(seq, Ship(decoding, blocks))
                failpoint("decode.7.shipping")

    # 8 End.

    def _end(self, *ended: Decode) -> None:
        """The ends are written in one round trip."""
        begun_s = now_s()
        for decoding in ended:
            if decoding.error is not None:
                decoding.finish = "cancelled" if isinstance(decoding.error, Cancelled) else "error"
            self._forget(decoding)
        ends = [(decoding.claim, decoding.end_event()) for decoding in ended]
        for decoding, (claim, end), done in zip(ended, ends, self.record.finish_all(ends), strict=True):
            if done:
                failpoint("decode.8.ended")
                self.load.outputs[decoding.delivery.klass].note(claim.num_tokens)
                self.figures.ended(decoding.delivery.klass, operation_in(decoding.delivery.headers), end)
                told = usage_attributes(end.usage, end.finish_reason)
                tracing.note("end", decoding.context, begun_s, now_s(), **told)
                events: list[TokenEvent | EndEvent] = [*decoding.said, end]
                self._settle(decoding.delivery, decoding.job, events, claim, decoding.chain, decoding.error)
            else:
                self._give_back(claim, decoding.delivery)

    def _forget(self, task: Decode) -> None:
        task.span.end()
        del self.running[task.job.id]
        self.session.drop(task.claim)
        if task.seq is not None:
            self.engine.remove(task.seq)

    # 9 Settle.

    def _settle(
        self,
        delivery: Delivery,
        job: Job,
        log: Iterable[TokenEvent | EndEvent],
        claim: Claim,
        chain: Chain,
        error: RequestError | None = None,
    ) -> None:
        """`chain` names the prompt's blocks, as far as they are known. `error`: what it ended with, if that is known
        better than from the log.
        """
        result = result_of(job, self.engine.model.name, log)
        if result is None:  # the record was lost between the claim and the reading
            self.inbox.put_back(delivery)
            return
        context = self._context(delivery, job)
        outputs = [outgoing_result(self.pipeline, result, tracing.headers_of(context))]
        dead = list[Outgoing]()
        if result.error is not None and (job.error is None or job.error.code != result.error.code):
            dead = letters(self.pipeline, delivery, error or result.error.exception(), claim)
        if delivery.is_held:
            span = tracing.begin("settle", context)

            def done(settled: bool) -> None:
                span.end()
                self.figures.buried(len(dead) * settled)

            self.settler.settle(Settlement(delivery, outputs + dead), done)
            failpoint("decode.9.asked")
        self._end_leases(job, chain)

    def _context(self, delivery: Delivery, job: Job) -> Context:
        """What the spans of a job are in."""
        return tracing.context_of(delivery.headers, tracing.about(self.pipeline, job.id, Context()))

    def _end_leases(self, job: Job, chain: Chain) -> None:
        """The job is done: nothing is kept for it any more."""
        chain.extend(job.token_ids)  # nothing is hashed again: where it was decoded here, they are all known
        names, tail = chain.names[: len(job.token_ids) // chain.block_size], chain.tail(job.token_ids)
        self.transfers.release(self.pipeline.lease_owner(job.id), [*names, *([tail] if tail else [])])
