"""The workers' side of the record: each method is one of its scripts, explained under `lua/`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from penstock.config.settings import RecordSettings
from penstock.messages import EndEvent, TokenEvent
from penstock.names import START_HASH, Pipeline, Stage
from penstock.record import scripts
from penstock.record.append import TokenAppender, encode_append_head
from penstock.record.claim import AppendOutcome, Bound, Busy, Claim, Conflict, TakenOver
from penstock.record.log import RequestStatus, TokenLog, parse_entries
from penstock.redis.client import execute_pipeline
from penstock.redis.scripts import Call

log = logging.getLogger(__name__)

Args = list[str | int | bytes]


@dataclass(frozen=True)
class UnclaimedMessage:
    """A message that no worker has claimed yet: the request's id, its body's hash or the job's id, and the message as
    somebody who takes it over has to know it.
    """

    id: str
    body_hash: str
    job_id: str
    message: bytes


@dataclass(frozen=True)
class Renewed:
    """A session that was renewed: until when it lasts, and what time it is, by the server's clock in ms."""

    until_ms: int
    now_ms: int
    num_free: int
    """Requests of the stage that any worker may take."""
    cancelled: list[str]
    """Requests that it holds, and that are to end."""


class Record:
    """The records of one pipeline's requests. `client` is a `redis.Redis` without `decode_responses`.

    Thread-safe, except that `append`, `send_append` and `collect` share a connection: one thread's.
    """

    def __init__(self, client: "redis.Redis", pipeline: Pipeline, settings: RecordSettings) -> None:
        self._client = client
        self._pipeline = pipeline
        self._settings = settings
        self._lease_ms = round(settings.lease_s * 1000)
        self._longest_ms = round(settings.retry_cap_s * 1000) + self._lease_ms
        """What any request waits for lies no further ahead."""
        self._keep_ms = round(settings.keep_s * 1000)
        self._pending_ms = round(settings.pending_keep_s * 1000)
        self._held = pipeline.held_key("%s")
        self._appends = TokenAppender(client)
        self._log = TokenLog(client, pipeline, settings)

    @property
    def settings(self) -> RecordSettings:
        """How long things last, and how often they are tried."""
        return self._settings

    @property
    def lease_s(self) -> float:
        """How long a session lasts without being renewed."""
        return self._settings.lease_s

    @property
    def current_problem(self) -> str:
        """Which of several servers are away, and why; else empty."""
        return ""

    # Requests.

    def claim_prefill(
        self, request_id: str, session: str, body: str, message: bytes = b""
    ) -> Claim | Busy | Bound | Conflict:
        """Claim a request for prefill. `body` is its `body_hash`, `session` the id of one that lives.

        `message`: what somebody who takes the request has to know of its delivery; empty: nobody can.
        """
        return self.claim_all("prefill", session, [UnclaimedMessage(request_id, body, "", message)])[0]

    def claim_decode(self, request_id: str, session: str, job: str, message: bytes = b"") -> Claim | Busy | Bound:
        """Claim a request for decode with its job, which is bound to it if none is. `session`, `message`: as above."""
        (outcome,) = self.claim_all("decode", session, [UnclaimedMessage(request_id, "", job, message)])
        assert not isinstance(outcome, Conflict), "a job carries no body to compare"
        return outcome

    def claim_all(
        self, stage: Stage, session: str, waiting: Sequence[UnclaimedMessage]
    ) -> list[Claim | Busy | Bound | Conflict]:
        """Claim requests, and read their logs in decode, all in one round trip; outcomes in their order.

        If this raises it is unknown what was claimed: the session has to end, so that others can go on with it.
        """
        if not waiting:
            return []
        # A second claim of the session that holds a request would find it busy for as long as that lives.
        commands: list[Sequence[Any]] = []
        for one in waiting:
            call = self._claim_call(one.id, stage, [session, one.job_id, one.body_hash], one.message)
            commands.append(scripts.CLAIM.command(*call))
            if stage == "decode":
                commands.append(["XRANGE", self._pipeline.log_key(one.id), "-", "+"])
        replies = scripts.CLAIM.run_once(self._client, commands)
        claims, logs = (replies[::2], replies[1::2]) if stage == "decode" else (replies, [()] * len(replies))
        return [self._parse_outcome(one.id, stage, *answer) for one, *answer in zip(waiting, claims, logs, strict=True)]

    def _parse_outcome(self, request_id: str, stage: Stage, reply: Any, log: Any) -> Claim | Busy | Bound | Conflict:
        match reply[0]:
            case b"busy":
                return Busy(reply[1] / 1000)
            case b"bound":
                return Bound()
            case b"conflict":
                return Conflict()
        return self._parse_claim(request_id, stage, reply, log)

    def _claim_call(self, request_id: str, stage: Stage, who: list[str], message: bytes) -> Call:
        keys = [*self._request_keys(request_id), self._pipeline.sessions_key(stage), self._pipeline.free_key(stage)]
        times = [self._lease_ms, self._longest_ms, self._pending_ms]
        return keys, [request_id, stage, *who, *times, START_HASH, message, self._held]

    def put_down(self, stage: Stage, waiting: Sequence[UnclaimedMessage]) -> list[UnclaimedMessage]:
        """Keep the messages of requests that nobody has begun, in one round trip: any worker of the stage may take
        them. Anybody who read them may put them down; whoever has their deliveries settles them.

        Returns those that cannot be put down now, as their server of several is away.
        """
        calls = [self._claim_call(one.id, stage, ["", one.job_id, one.body_hash], one.message) for one in waiting]
        scripts.CLAIM.run_all(self._client, calls)
        return []

    def take_over_free(self, stage: Stage, session: str, most: int) -> list[TakenOver]:
        """Go on with requests that are free, at most so many.

        If this raises it is unknown what was taken: the session has to end, so that others can go on with it.
        """
        pipeline = self._pipeline
        keys = [pipeline.free_key(stage), pipeline.sessions_key(stage), pipeline.held_key(session)]
        looks = [pipeline.record_key("%s"), pipeline.log_key("%s")]
        args: Args = [session, stage, most, self._longest_ms, self._pending_ms, *looks]
        (taken,) = scripts.TAKE.run_once(self._client, [scripts.TAKE.command(keys, args)])
        logs: list[Any] = [()] * len(taken)
        if stage == "decode" and taken:
            with self._client.pipeline(transaction=False) as pipe:
                for name, _, _ in taken:
                    pipe.xrange(pipeline.log_key(name.decode()))
                logs = execute_pipeline(pipe)
        return [
            TakenOver(self._parse_claim(name.decode(), stage, reply, log), message)
            for (name, reply, message), log in zip(taken, logs, strict=True)
        ]

    def _parse_claim(self, request_id: str, stage: Stage, reply: Sequence[Any], log: Any) -> Claim:
        keys = self._request_keys(request_id)
        _, epoch, num_tokens, rolled, ended, cancelled, attempts = reply
        return Claim(
            id=request_id,
            stage=stage,
            epoch=epoch,
            num_tokens=num_tokens,
            rolling_hash=rolled.decode(),
            is_ended=bool(ended),
            is_cancelled=bool(cancelled),
            attempts=attempts,
            is_exhausted=attempts > self._settings.max_attempts,
            log=parse_entries(log),
            append_head=encode_append_head(keys, self._pipeline.live_channel(request_id), self._pending_ms, epoch),
        )

    def append_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> list[AppendOutcome]:
        """Append one token to each claim's log, in one round trip; outcomes in the order of the entries."""
        self.send_tokens(entries)
        return self.collect_outcomes()

    def send_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        """Send tokens on their way and return at once; their claims move on.

        May be called again before `collect`, also for the same claims.
        """
        self._appends.send_tokens(entries)

    def collect_outcomes(self) -> list[AppendOutcome]:
        """The outcomes of everything sent since the last `collect`, in that order.

        A lost connection is opened again, and what has no reply is sent again: a token that was written is
        recognised. If that fails too, raises `redis.ConnectionError` or `redis.TimeoutError`, forgetting
        nothing: call `collect` again.
        """
        return self._appends.collect_outcomes()

    def wait_for_outcome(self, timeout_s: float) -> bool:
        """Whether `collect` finds an answer within a time. Raises `redis.ConnectionError`."""
        return self._appends.wait_for_outcome(timeout_s)

    def forget_sent_tokens(self) -> None:
        """Give up what was sent: whether it was written is for the next claim to find out."""
        self._appends.forget_sent()

    def finish_request(self, claim: Claim, end: EndEvent) -> bool:
        """Append the end; False when fenced. Collect the claim's tokens first. May be repeated.

        The number of tokens in the log becomes the usage's `completion_tokens`: readers rely on it. The id is
        remembered for as long as the settings say, and as long as the request took since it was published: what was
        published beside it may wait as long.
        """
        return self.finish_all([(claim, end)])[0]

    def finish_all(self, ends: Sequence[tuple[Claim, EndEvent]]) -> list[bool]:
        """`finish` for each, in one round trip."""
        calls = [(self._request_keys(claim.id), self._finish_args(claim, end)) for claim, end in ends]
        return [bool(reply) for reply in scripts.FINISH.run_all(self._client, calls)]

    def _finish_args(self, claim: Claim, end: EndEvent) -> list[str | int | bytes]:
        usage = end.usage.model_copy(update={"completion_tokens": claim.num_tokens})
        event = end.model_copy(update={"usage": usage}).encode()
        times = end.timings
        took_ms = round(max(0.0, times.finished - times.published) * 1000) if times.published > 0 else 0
        keep_ms = self._keep_ms + min(took_ms, self._pending_ms)
        channel = self._pipeline.live_channel(claim.id)
        return [channel, claim.epoch, claim.num_tokens, event, keep_ms, claim.id, self._held]

    def note_handed_off(self, claim: Claim) -> bool:
        """The hand-off is durable: nobody holds the request. False when it has gone on, which is fine."""
        return self.note_all_handed_off([claim])[0]

    def note_all_handed_off(self, claims: Sequence[Claim]) -> list[bool]:
        """`handed` for each, in one round trip."""
        calls: list[Call] = [
            (self._request_keys(claim.id)[:1], [claim.id, claim.epoch, self._held]) for claim in claims
        ]
        return [bool(reply) for reply in scripts.HANDED.run_all(self._client, calls)]

    def release_claim(self, claim: Claim, *, failed: bool = False, delivered: bool = True, wait_s: float = 0.0) -> bool:
        """Give an unfinished request back, to be claimed in `wait_s` or at once. False when it was lost, or
        given back, before.

        With `failed` the attempt counts; without, the worker was merely told to stop. Where it was `delivered` it is
        left for a lease to whoever gets the delivery next; then, and without a delivery at once, anybody may take it.
        """
        call = self._release_call(claim, failed=failed, delivered=delivered, wait_s=wait_s)
        return bool(scripts.RELEASE.run(self._client, *call))

    def release_all(self, claims: Sequence[tuple[Claim, bool]]) -> list[bool]:
        """`release` for each claim at once, `delivered` or not, in one round trip."""
        calls = [self._release_call(claim, delivered=delivered) for claim, delivered in claims]
        return [bool(reply) for reply in scripts.RELEASE.run_all(self._client, calls)]

    def _release_call(self, claim: Claim, *, failed: bool = False, delivered: bool = True, wait_s: float = 0.0) -> Call:
        keys = [self._pipeline.record_key(claim.id), self._pipeline.free_key(claim.stage)]
        grace_ms = self._lease_ms if delivered else 0
        return keys, [claim.id, claim.epoch, int(failed), round(wait_s * 1000), grace_ms, self._held]

    # Sessions, see `penstock.record.session`.

    def renew_session(
        self, stage: Stage, session: str, until_ms: int = 0, parts: Sequence[str] = (), left: Sequence[str] = ()
    ) -> Renewed | None:
        """Say that a session lives, that it reads these parts, and those that it `left` no more; None when it is over.

        `until_ms`: until when it lasts, as far as that is known; 0: it begins.
        """
        pipeline = self._pipeline
        keys = [pipeline.sessions_key(stage), pipeline.news_key(session), pipeline.free_key(stage)]
        args: Args = [session, self._lease_ms, until_ms, len(parts), *parts, *left]
        reply = scripts.RENEW.run(self._client, [*keys, pipeline.readers_key(stage)], args)
        if not reply:
            return None
        until, now, num_free, *news = reply
        return Renewed(until, now, num_free, [word.decode().removeprefix("c:") for word in news])

    def end_expired_sessions(self, stage: Stage, as_of_ms: int, session: str = "") -> int:
        """End sessions whose time was over then, and this one in any case; what they held is free.

        Returns how many requests are free now.
        """
        pipeline = self._pipeline
        looks = [pipeline.held_key("%s"), pipeline.news_key("%s"), pipeline.record_key("%s")]
        keys = [pipeline.sessions_key(stage), pipeline.free_key(stage)]
        args: Args = [as_of_ms, self._lease_ms, session, *looks]
        num_free, *ended = scripts.REAP.run(self._client, keys, args)
        for one in ended:
            log.info("the %s session %s is over", stage, one.decode())
        return int(num_free)

    def adopt_partitions(self, stage: Stage, session: str) -> list[str]:
        """Read the parts of topics that nobody reads; returns all that are this session's."""
        keys = [self._pipeline.readers_key(stage), self._pipeline.sessions_key(stage)]
        return [part.decode() for part in scripts.ADOPT.run(self._client, keys, [session])]

    def disown_partitions(self, stage: Stage, session: str, parts: Sequence[str]) -> None:
        """Read nothing any more. These parts go to other members; what was adopted is to be adopted by others."""
        scripts.DISOWN.run(self._client, [self._pipeline.readers_key(stage)], [session, *parts])

    def count_free(self, stage: Stage) -> int:
        """How many requests any worker of a stage may take now."""
        seconds, microseconds = self._client.time()
        return self._client.zcount(self._pipeline.free_key(stage), "-inf", seconds * 1000 + microseconds // 1000)

    # Reading.

    def cancel_request(self, request_id: str) -> bool:
        """Ask for a request's end, also before any worker saw it; False when it has ended already."""
        return self._log.cancel_request(request_id)

    def read_log(self, request_id: str, after_position: int = -1) -> list[TokenEvent | EndEvent]:
        """What the log holds after the token at `after_position` (-1: from the beginning)."""
        return self._log.read_events(request_id, after_position)

    def read_status(self, request_id: str) -> RequestStatus | None:
        """What is known about a request; None when nothing is."""
        return self._log.read_status(request_id)

    def close(self) -> None:
        """Free the connection of the appends. The client stays the caller's."""
        self._appends.close()

    def _request_keys(self, request_id: str) -> list[str]:
        return [self._pipeline.record_key(request_id), self._pipeline.log_key(request_id)]
