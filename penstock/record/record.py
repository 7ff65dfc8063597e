"""The workers' side of the record: each method is one of its scripts, explained under `lua/`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import NoScriptError

from penstock.messages import EndEvent, TokenEvent
from penstock.names import START_HASH, Pipeline, Stage
from penstock.reach import replies_to
from penstock.record import scripts
from penstock.record.append import Appends, append_head
from penstock.record.claim import AppendOutcome, Bound, Busy, Claim, Conflict, Renewal, TakenOver
from penstock.record.log import Log, Status, events_of
from penstock.record.readers import Readers
from penstock.settings import RecordSettings


@dataclass(frozen=True)
class Waiting:
    """A message that no worker has claimed yet: the request's id, its body's hash or the job's id, and the message as
    somebody who takes it over has to know it.
    """

    id: str
    body: str
    job: str
    message: bytes


class Record:
    """The records of one pipeline's requests. `client` is a `redis.Redis` without `decode_responses`.

    Thread-safe, except that `append`, `send_append` and `collect` share a connection: one thread's.
    """

    def __init__(self, client: "redis.Redis", pipeline: Pipeline, settings: RecordSettings) -> None:
        self._client = client
        self._pipeline = pipeline
        self._settings = settings
        self._lease_ms = round(settings.lease_s * 1000)
        self._keep_ms = round(settings.keep_s * 1000)
        self._pending_ms = round(settings.pending_keep_s * 1000)
        self._appends = Appends(client)
        self._log = Log(client, pipeline, settings)

    @property
    def settings(self) -> RecordSettings:
        """How long things last, and how often they are tried."""
        return self._settings

    @property
    def lease_s(self) -> float:
        """How long a claim lasts without being renewed."""
        return self._settings.lease_s

    def claim_prefill(
        self, request_id: str, owner: str, body: str, message: bytes = b""
    ) -> Claim | Busy | Bound | Conflict:
        """Claim a request for prefill. `body` is its `body_hash`, `owner` a name for people.

        `message`: what somebody who takes the request over has to know of its delivery; empty: nobody can.
        """
        return self._claim(request_id, "prefill", [owner, "", body], message)

    def claim_decode(self, request_id: str, owner: str, job: str, message: bytes = b"") -> Claim | Busy | Bound:
        """Claim a request for decode with its job, which is bound to it if none is. `message`: as above."""
        outcome = self._claim(request_id, "decode", [owner, job, ""], message)
        assert not isinstance(outcome, Conflict), "a job carries no body to compare"
        return outcome

    def _claim(self, request_id: str, stage: Stage, who: list[str], message: bytes) -> Claim | Busy | Bound | Conflict:
        """In one round trip, in this order: the request is named as held, claimed, and in decode its log is read."""
        try:
            reply, log = self._send_claim(request_id, stage, who, message)
        except NoScriptError:
            self._client.script_load(scripts.CLAIM.text)
            reply, log = self._send_claim(request_id, stage, who, message)
        match reply[0]:
            case b"busy":
                return Busy(reply[1] / 1000)
            case b"bound":
                return Bound()
            case b"conflict":
                return Conflict()
        return self._claimed(request_id, stage, reply, log)

    def _send_claim(self, request_id: str, stage: Stage, who: list[str], message: bytes) -> tuple[Any, Any]:
        """The script's reply, and the log's entries."""
        keys = self._keys(request_id)
        with self._client.pipeline(transaction=False) as pipe:
            if message:
                scripts.HELD.add_text(pipe, [self._pipeline.held_key(stage)], [self._lease_ms, request_id])
            scripts.CLAIM.add(pipe, keys, self._claim_args(stage, who, message))
            if stage == "decode":
                pipe.xrange(keys[1])
            replies = replies_to(pipe)
        return (replies[-2], replies[-1]) if stage == "decode" else (replies[-1], ())

    def _claim_args(self, stage: Stage, who: list[str], message: bytes) -> list[str | int | bytes]:
        return [stage, *who, self._lease_ms, self._pending_ms, START_HASH, message]

    def put_down(self, stage: Stage, waiting: Sequence[Waiting], *, is_here: bool = True) -> None:
        """Keep the messages of requests that wait for a place in this worker, in one round trip. As long as they are
        `named` nobody else takes them over; those that are not here, anybody may at once. Who looks before they are put
        down finds nothing and forgets their names: so they have a lease until then.
        """
        ids = [one.id for one in waiting]
        self.name(stage, ids)
        calls = [(self._keys(one.id), self._claim_args(stage, ["", one.job, one.body], one.message)) for one in waiting]
        scripts.CLAIM.run_all(self._client, calls)
        if ids and not is_here:
            self._hold(stage, ids, 0)

    def name(self, stage: Stage, request_ids: Sequence[str]) -> None:
        """Say that these are held, for a lease: nobody else looks after them before that."""
        if request_ids:
            self._hold(stage, request_ids, self._lease_ms)

    def readers(self, stage: Stage, owner: str) -> Readers:
        """What the stage's workers say of the partitions that they read; `owner` as in a claim."""
        return Readers(self._client, self._pipeline, stage, owner, self.lease_s)

    def num_overdue(self, stage: Stage) -> int:
        """How many requests of a stage there are whose leases may have run out, and who was told to nobody."""
        seconds, microseconds = self._client.time()
        return self._client.zcount(self._pipeline.held_key(stage), "-inf", seconds * 1000 + microseconds // 1000)

    def overdue(self, stage: Stage, limit: int) -> list[str]:
        """At most `limit` requests of a stage whose leases may have run out. Others are not told for a while."""
        keys, args = [self._pipeline.held_key(stage)], [limit, max(1, self._lease_ms // 2)]
        return [found.decode() for found in scripts.OVERDUE.run(self._client, keys, args)]

    def take_over(self, request_id: str, stage: Stage, owner: str) -> TakenOver | None:
        """Go on with a request whose holder's lease ran out; None if there is nothing to go on with."""
        args: list[str | int | bytes] = [stage, owner, self._lease_ms, self._pending_ms]
        reply = scripts.TAKEOVER.run(self._client, self._keys(request_id), args)
        match reply[0]:
            case b"busy":
                self._hold(stage, [request_id], reply[1] + 1)
                return None
            case b"gone":
                self._client.zrem(self._pipeline.held_key(stage), request_id)
                return None
        log = self._client.xrange(self._keys(request_id)[1]) if stage == "decode" else ()
        return TakenOver(self._claimed(request_id, stage, reply[:-1], log), reply[-1])

    def let_go(self, stage: Stage, request_ids: Sequence[str]) -> None:
        """These ended or were handed off. Not saying so costs whoever looks for the dead a question each."""
        if request_ids:
            self._client.zrem(self._pipeline.held_key(stage), *request_ids)

    def _hold(self, stage: Stage, request_ids: Sequence[str], due_ms: int) -> None:
        scripts.HELD.run(self._client, [self._pipeline.held_key(stage)], [due_ms, *request_ids])

    def _claimed(self, request_id: str, stage: Stage, reply: Sequence[Any], log: Any) -> Claim:
        keys = self._keys(request_id)
        _, epoch, num_tokens, rolled, ended, cancelled, attempts = reply
        return Claim(
            id=request_id,
            stage=stage,
            epoch=epoch,
            num_tokens=num_tokens,
            hash=rolled.decode(),
            ended=bool(ended),
            cancelled=bool(cancelled),
            attempts=attempts,
            exhausted=attempts > self._settings.max_attempts,
            log=events_of(log),
            append_head=append_head(keys, self._pipeline.live_channel(request_id), self._pending_ms, epoch),
        )

    def append(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> list[AppendOutcome]:
        """Append one token to each claim's log, in one round trip; outcomes in the order of the entries."""
        self.send_append(entries)
        return self.collect()

    def send_append(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        """Send tokens on their way and return at once; their claims move on.

        May be called again before `collect`, also for the same claims.
        """
        self._appends.send(entries)

    def collect(self) -> list[AppendOutcome]:
        """The outcomes of everything sent since the last `collect`, in that order.

        A lost connection is opened again, and what has no reply is sent again: a token that was written is
        recognised. If that fails too, raises `redis.ConnectionError` or `redis.TimeoutError`, forgetting
        nothing: call `collect` again.
        """
        return self._appends.collect()

    def finish(self, claim: Claim, end: EndEvent) -> bool:
        """Append the end; False when fenced. Collect the claim's tokens first. May be repeated.

        The number of tokens in the log becomes the usage's `completion_tokens`: readers rely on it. The id is
        remembered for as long as the settings say, and as long as the request took since it was published: what was
        published beside it may wait as long.
        """
        return self.finish_all([(claim, end)])[0]

    def finish_all(self, ends: Sequence[tuple[Claim, EndEvent]]) -> list[bool]:
        """`finish` for each, in one round trip."""
        calls = [(self._keys(claim.id), self._finish_args(claim, end)) for claim, end in ends]
        return [bool(reply) for reply in scripts.FINISH.run_all(self._client, calls)]

    def _finish_args(self, claim: Claim, end: EndEvent) -> list[str | int | bytes]:
        usage = end.usage.model_copy(update={"completion_tokens": claim.num_tokens})
        event = end.model_copy(update={"usage": usage}).encode()
        times = end.timings
        took_ms = round(max(0.0, times.finished - times.published) * 1000) if times.published > 0 else 0
        keep_ms = self._keep_ms + min(took_ms, self._pending_ms)
        return [self._pipeline.live_channel(claim.id), claim.epoch, claim.num_tokens, event, keep_ms]

    def handed(self, claim: Claim) -> bool:
        """The hand-off is durable: give the lease back. False when the request has gone on, which is fine."""
        return bool(scripts.HANDED.run(self._client, self._keys(claim.id)[:1], [claim.epoch]))

    def release(self, claim: Claim, *, failed: bool = False, delivered: bool = True, wait_s: float = 0.0) -> bool:
        """Give an unfinished request back, to be claimed in `wait_s` or at once. False when it was lost before.

        With `failed` the attempt counts; without, the worker was merely told to stop. Where it was `delivered` it is
        left for a lease to whoever gets the delivery next; then, and without a delivery at once, anybody may take it
        over.
        """
        wait_ms = round(wait_s * 1000)
        args = [claim.epoch, int(failed), wait_ms]
        released = bool(scripts.RELEASE.run(self._client, self._keys(claim.id)[:1], args))
        if released:
            self._hold(claim.stage, [claim.id], wait_ms + delivered * self._lease_ms)
        return released

    def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Renew the leases of all claims in one round trip, those of one stage."""
        if not claims:
            return []
        self.name(claims[0].stage, [claim.id for claim in claims])
        calls = [(self._keys(claim.id)[:1], [claim.epoch, self._lease_ms]) for claim in claims]
        return [Renewal(reply) for reply in scripts.RENEW.run_all(self._client, calls)]

    def cancel(self, request_id: str) -> bool:
        """Ask for a request's end, also before any worker saw it; False when it has ended already."""
        return self._log.cancel(request_id)

    def read_log(self, request_id: str, after_position: int = -1) -> list[TokenEvent | EndEvent]:
        """What the log holds after the token at `after_position` (-1: from the beginning)."""
        return self._log.read(request_id, after_position)

    def status(self, request_id: str) -> Status | None:
        """What is known about a request; None when nothing is."""
        return self._log.status(request_id)

    def close(self) -> None:
        """Free the connection of the appends. The client stays the caller's."""
        self._appends.close()

    def _keys(self, request_id: str) -> list[str]:
        return [self._pipeline.record_key(request_id), self._pipeline.log_key(request_id)]
