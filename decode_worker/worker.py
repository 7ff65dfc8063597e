"""The decode worker: job references in; token streams and results out.

One turn of the loop, numbered as in the life of a request (docs/structure.md):

    6  claim     epoch + 1 in Redis, the job bound if none is; the log is read, and the KV blocks
    7  step      one token for each running request, appended at its position; the appends of a step travel while the
                 next one is computed
    8  end       finish reason, usage and timings are appended
    9  settle    result out, job done, together

What a crash costs: after 6 or 7, the next holder reads the log and goes on at its end, logged tokens are never sampled
again; after 8, it only settles; a crash inside 9 leaves either nothing or all of it.
"""

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Span

from decode_worker.emit import Emitter
from decode_worker.result import outgoing_result, result_of
from engine.engine import Engine, Sampled
from engine.sequence import Sequence
from engine.text import OutputState
from kvstore.store import KVStore
from penstock import tracing
from penstock.bus.contract import Delivery, Member, Settlement
from penstock.bus.retries import dead_message
from penstock.errors import (
    POISONOUS,
    Cancelled,
    DeliveryLost,
    InternalError,
    RequestError,
)
from penstock.messages import EndEvent, ErrorInfo, FinishReason, Job, TokenEvent, Usage, decode, now_s
from penstock.names import Pipeline
from penstock.record import AppendOutcome, Bound, Busy, Claim, LeaseKeeper, Record
from penstock.worker import Inbox, Settler, cause_to_end, too_late

log = logging.getLogger(__name__)


@dataclass
class Decode:
    """A request whose answer is being written."""

    delivery: Delivery
    job: Job
    claim: Claim
    output: OutputState
    span: Span
    said: list[TokenEvent]
    """The log: as it was found, and what was sent to it since."""
    seq: Sequence | None = None
    """None until the engine has it."""
    started_s: float = field(default_factory=now_s)
    finish: FinishReason | None = None
    """Set with the last token; the end is appended once that token is in the log."""
    error: RequestError | None = None
    tail: str = ""
    """Text held back when the deadline cut the answer short."""
    context: Context = field(init=False)

    def __post_init__(self) -> None:
        self.context = tracing.within(self.span)

    def end_event(self) -> EndEvent:
        """The end of the log, stamped now."""
        usage = Usage(
            prompt_tokens=len(self.job.token_ids),
            cached_tokens=self.job.cached_tokens,
            completion_tokens=self.claim.num_tokens,
        )
        timings = self.job.timings.model_copy(update={"decode_started": self.started_s, "finished": now_s()})
        error = None if self.error is None else ErrorInfo.of(self.error)
        return EndEvent(finish_reason=self.finish or "error", text=self.tail, usage=usage, timings=timings, error=error)


class DecodeWorker:
    """One decode worker over its engine, KV store, record and place in the group."""

    def __init__(
        self, pipeline: Pipeline, name: str, engine: Engine, store: KVStore, record: Record, member: Member
    ) -> None:
        self.pipeline, self.name = pipeline, name
        self.engine, self.store, self.record, self.member = engine, store, record, member
        self.settler, self.leases, self.emitter = Settler(member), LeaseKeeper(record), Emitter(record)
        self.inbox = Inbox(member)
        self.running: dict[str, Decode] = {}

    # The loop.

    def turn(self, *, accept: bool = True) -> bool:
        """One turn of the loop; whether it did anything."""
        self.settler.check()
        room = self.engine.room(), self.engine.room("interactive")
        deliveries = self.inbox.poll(*room, idle=not self.running) if accept else []
        for delivery in deliveries:
            self._admit(delivery)
        sampled = self.engine.step() if self.engine.has_work() else []
        self._confirm(self.emitter.collect())
        self._expire()
        self._emit(sampled)
        return bool(deliveries or sampled)

    def is_settled(self) -> bool:
        """Whether nothing waits, for a lease or for a commit."""
        return not len(self.inbox) and not len(self.settler)

    def close(self) -> None:
        """Hand back what is not finished, and leave the group."""
        self._confirm(self.emitter.collect())
        self.settler.wait(timeout_s=10.0)
        for decoding in list(self.running.values()):
            self._forget(decoding)
            self.record.release(decoding.claim)
        self.leases.close()
        self.settler.close()
        self.member.close()

    # 6 Claim.

    def _admit(self, delivery: Delivery) -> None:
        try:
            job = decode(Job, delivery.value)
        except RequestError as error:
            with contextlib.suppress(DeliveryLost):
                self.member.dead(delivery, f"{error.code}: {error}")
            return
        claimed = self.record.claim_decode(job.id, self.name, job.job)
        match claimed:
            case Busy(wait_s=wait_s):
                self.inbox.put_back(delivery, wait_s)
            case Bound():
                self.settler.settle(Settlement(delivery))
            case Claim() if claimed.ended:
                self._settle(delivery, job, self.record.read_log(job.id))
            case Claim():
                self._begin(delivery, job, claimed)

    def _begin(self, delivery: Delivery, job: Job, claim: Claim) -> None:
        if job.id in self.running:  # held until its lease ran out, and now claimed anew
            self._forget(self.running[job.id])
        parent = tracing.context_of(delivery.headers)
        tracing.note("queue.wait", parent, delivery.timestamp_s, now_s(), topic=delivery.topic)
        span = tracing.begin("decode", parent, attempt=claim.attempts)
        model, sampling = self.engine.model, job.sampling
        output = OutputState(model.tokenizer, sampling, model.eos_token_ids, sampling.max_tokens)
        said = [event for event in self.record.read_log(job.id) if isinstance(event, TokenEvent)]
        decoding = self.running[job.id] = Decode(delivery, job, claim, output, span, said)
        self.leases.add(claim)
        for event in said:
            decoding.finish = output.push(event.token)[1]
        decoding.error = self._cause_to_end(decoding)
        if decoding.error is None and decoding.finish is None:
            try:
                self.engine.add(self._sequence(decoding))
            except RequestError as error:
                decoding.error = error
        if decoding.error is not None or decoding.finish is not None:
            self._end(decoding)

    def _sequence(self, decoding: Decode) -> Sequence:
        """The request as the engine takes it, with the prompt's KV blocks that could be had.

        Only blocks that the pool does not hold are fetched; what is missing is computed again.
        """
        job, block_size = decoding.job, self.store.layout.block_size
        keys = self.store.keys(job.tenant, job.token_ids)
        seq = decoding.seq = Sequence(
            job.id,
            job.token_ids,
            sampling=job.sampling,
            seed=job.seed,
            max_new=job.sampling.max_tokens,
            given=[event.token for event in decoding.said],
            prefix_keys=keys[: len(job.token_ids) // block_size],
            klass=job.klass,
            tenant=job.tenant,
        )
        if keys[-1].hex() != job.last_block:
            log.warning("%s: its KV is of another model or secret, computing it again", job.id)
            return seq
        begun_s = now_s()
        held = self.engine.cached_blocks(seq.prefix_keys)
        found = self.store.get_prefix(keys, len(job.token_ids), start=held)
        seq.imported = [(held + n, payload) for n, payload in enumerate(found)]
        tracing.note("kv.read", decoding.context, begun_s, now_s(), blocks=len(keys), held=held, found=len(found))
        return seq

    def _cause_to_end(self, decoding: Decode) -> RequestError | None:
        job, claim = decoding.job, decoding.claim
        if job.error is not None:
            return job.error.exception()
        if not job.token_ids:
            return InternalError("the request's record was lost after it had ended in prefill")
        return cause_to_end(claim, job.deadline)

    # 7 Step.

    def _emit(self, sampled: list[Sampled]) -> None:
        entries = []
        for item in sampled:
            decoding = self.running.get(item.seq.id)
            if decoding is None or decoding.seq is not item.seq:
                continue
            text, decoding.finish = decoding.output.push(item.token_id)
            decoding.said.append(decoding.claim.next_event(item.token_id, text, item.logprobs))
            entries.append((decoding.claim, decoding.said[-1]))
            if decoding.finish is not None:
                self.engine.remove(item.seq)
        self.emitter.send(entries)

    def _confirm(self, outcomes: list[tuple[Claim, AppendOutcome]]) -> None:
        """Act on what became of the last step's tokens."""
        for claim, outcome in outcomes:
            decoding = self.running.get(claim.id)
            if decoding is None or decoding.claim is not claim:
                continue
            if outcome is AppendOutcome.FENCED:
                self._forget(decoding)
                self.inbox.put_back(decoding.delivery)
            elif outcome is AppendOutcome.CANCELLED:
                decoding.said.pop()
                decoding.error = Cancelled("cancelled while it was decoded")
                self._end(decoding)
            elif decoding.finish is not None:
                self._end(decoding)

    def _expire(self) -> None:
        for decoding in list(self.running.values()):
            decoding.error = too_late(decoding.job.deadline)
            if decoding.error is not None:
                decoding.tail = decoding.output.flush()
                self._end(decoding)

    # 8 End.

    def _end(self, decoding: Decode) -> None:
        if decoding.error is not None:
            decoding.finish = "cancelled" if isinstance(decoding.error, Cancelled) else "error"
        self._forget(decoding)
        end = decoding.end_event()
        if self.record.finish(decoding.claim, end):
            self._settle(decoding.delivery, decoding.job, [*decoding.said, end])
        else:
            self.inbox.put_back(decoding.delivery)

    def _forget(self, decoding: Decode) -> None:
        decoding.span.end()
        del self.running[decoding.job.id]
        self.leases.drop(decoding.claim)
        if decoding.seq is not None:
            self.engine.remove(decoding.seq)

    # 9 Settle.

    def _settle(self, delivery: Delivery, job: Job, log: Iterable[TokenEvent | EndEvent]) -> None:
        result = result_of(job, self.engine.model.name, log)
        if result is None:  # the record was lost between the claim and the reading
            self.inbox.put_back(delivery)
            return
        context = tracing.headers_of(tracing.context_of(delivery.headers))
        outputs = [outgoing_result(self.pipeline, result, context)]
        if result.error is not None and result.error.code in POISONOUS and job.error is None:
            reason = f"{result.error.code}: {result.error.message}"
            outputs.append(dead_message(self.pipeline, delivery, reason))
        self.settler.settle(Settlement(delivery, outputs))
