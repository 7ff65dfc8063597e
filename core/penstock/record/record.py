"""The workers' side of the record. Each method runs one of the scripts under `lua/`; their headers explain them."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis

from penstock.config.settings import RecordSettings
from penstock.errors import ContentErased, StateMismatch, StreamError, TenantKeyMissing
from penstock.messages import EndEvent, TokenEvent
from penstock.names import STAGES, START_HASH, Pipeline, Stage
from penstock.record.append import TokenAppender, encode_append_head
from penstock.record.claim import AppendOutcome, Bound, Busy, Claim, Conflict, TakenOver
from penstock.record.log import RequestStatus, TokenLog, parse_entries
from penstock.redis.client import execute_all, execute_pipeline, find_pace, raise_outage
from penstock.redis.scripts import Call, Script, ScriptCall, load_script, run_together
from penstock.sealing import SEALED_HASH, seal_end

log = logging.getLogger(__name__)

CLAIM = load_script("penstock.record", "log_end", "ended", "claim")
TAKE = load_script("penstock.record", "log_end", "take")
REAP = load_script("penstock.record", "reap")
ADOPT = load_script("penstock.record", "adopt")
DISOWN = load_script("penstock.record", "disown")
FINISH = load_script("penstock.record", "ended", "finish")
HANDED = load_script("penstock.record", "handed")
RELEASE = load_script("penstock.record", "release")
RENEW = load_script("penstock.record", "renew")
KEEP_VECTORS_MS = 300_000
"""For how long a record with vectors is kept at most, unless the operator says: they are large."""

Args = list[str | int | bytes]


@dataclass(frozen=True)
class UnclaimedMessage:
    """A message that no worker has claimed yet. `id` is the request's."""

    id: str
    body_hash: str
    """The hash of the request's body; empty for a job."""
    name: str
    """The name that is bound to the request if this message settles its result."""
    message: bytes
    """The delivery, as a worker needs it that takes the request over."""
    since_result_s: float = math.inf
    """Seconds between the newest result of this id and the message; infinite if no result is known."""


@dataclass(frozen=True)
class Renewed:
    """A renewed session: when it expires, and the time now, both by the server's clock in ms."""

    until_ms: int
    now_ms: int
    cancelled: list[str]
    """The ids of requests that the session holds and that were cancelled."""


class Record:
    """The records of one pipeline's requests. `client` is a `redis.Redis` without `decode_responses`.

    Thread-safe, except that one thread has to send tokens and collect their outcomes, as both share a connection.
    """

    def __init__(self, client: "redis.Redis", pipeline: Pipeline, settings: RecordSettings) -> None:
        self._client = client
        self._pipeline = pipeline
        self._settings = settings
        self.pace = find_pace(client)
        """The pace at which the server answers."""
        self._longest_ms = round((settings.retry_cap_s + settings.lease_s) * 1000)
        """No request has to wait for longer than this."""
        self._keep_ms = round(settings.keep_s * 1000)
        self._pending_ms = round(settings.pending_keep_s * 1000)
        self._held = pipeline.held_key("%s")
        self._appends = TokenAppender(client)
        self._log = TokenLog(client, pipeline, settings)

    @property
    def settings(self) -> RecordSettings:
        """The settings of records: leases, attempts, and how long records are kept."""
        return self._settings

    @property
    def lease_s(self) -> float:
        """Seconds that a session lasts without a renewal: more if the server is slow to answer."""
        return self.pace.stretch(self._settings.lease_s)

    @property
    def _lease_ms(self) -> int:
        return round(self.lease_s * 1000)

    @property
    def current_problem(self) -> str:
        """The servers of several that are away, and the reasons; empty if none is."""
        return ""

    # Requests.

    def claim_all(
        self, stage: Stage, session: str, waiting: Sequence[UnclaimedMessage]
    ) -> list[Claim | Busy | Bound | Conflict]:
        """Claim requests, and in decode read their logs, in one round trip; in prefill another one reads the logs of
        those that were begun. Return the outcomes in their order.

        If this raises it is unknown which requests were claimed: the session has to end, so that other workers can take
        them over.
        """
        if not waiting:
            return []
        # Calls must not run twice: a second claim by the same session would find the request busy while that lives.
        commands: list[Sequence[Any]] = []
        for one in waiting:
            call = self._claim_call(stage, session, one)
            commands.append(CLAIM.command(*call))
            if stage == "decode":
                commands.append(["XRANGE", self._pipeline.log_key(one.id), "-", "+"])
        replies = CLAIM.run_once(self._client, commands)
        if stage == "decode":
            claims, logs = replies[::2], replies[1::2]
        else:
            claims = replies
            logs = self._read_logs([(one.id, reply) for one, reply in zip(waiting, claims, strict=True)])
        return [self._parse_outcome(one.id, stage, *answer) for one, *answer in zip(waiting, claims, logs, strict=True)]

    def _read_logs(self, claims: Sequence[tuple[str, Any]]) -> list[Any]:
        """Return the entries in the logs of claimed requests; none where a log is empty."""
        begun = [
            name
            for name, reply in claims
            if isinstance(reply, list) and reply[0] == b"claim" and (reply[2] > 0 or reply[4])
        ]
        if not begun:
            return [()] * len(claims)
        replies = execute_all(self._client, [["XRANGE", self._pipeline.log_key(name), "-", "+"] for name in begun])
        found = dict(zip(begun, raise_outage(replies), strict=True))
        return [found.get(name, ()) for name, _ in claims]

    def _parse_outcome(self, request_id: str, stage: Stage, reply: Any, log: Any) -> Claim | Busy | Bound | Conflict:
        if self._note_refusal(request_id, reply):  # the holder of the delivery ends the request, as with a claim
            return self._parse_claim(request_id, stage, (b"claim", 0, 0, b"", 0, 0, 1, 0, 1, 0), reply)
        match reply[0]:
            case b"busy":
                return Busy(reply[1] / 1000, reply[2])
            case b"bound":
                return Bound()
            case b"conflict":
                return Conflict()
        return self._parse_claim(request_id, stage, reply, log)

    def _claim_call(self, stage: Stage, session: str, asked: UnclaimedMessage) -> Call:
        keys = [*self._request_keys(asked.id), self._pipeline.sessions_key, self._pipeline.free_key(stage)]
        times = [self._lease_ms, self._longest_ms, self._pending_ms]
        who = [asked.id, stage, session, asked.name, asked.body_hash]
        is_answered = asked.since_result_s < self._settings.keep_s
        remembered = self._pipeline.ended_key("%d", "%s"), self._settings.remember_days
        return keys, [*who, *times, START_HASH, asked.message, self._held, int(is_answered), *remembered]

    def park_messages(self, stage: Stage, waiting: Sequence[UnclaimedMessage]) -> list[UnclaimedMessage]:
        """Park messages of requests that no worker has claimed, in one round trip: any worker may take them over.

        Any worker that read a message may park it; the worker that holds its delivery settles it. Return the messages
        that cannot be parked now, because their server of several is away.
        """
        calls = [self._claim_call(stage, "", one) for one in waiting]
        for one, reply in zip(waiting, CLAIM.run_all(self._client, calls), strict=True):
            self._note_refusal(one.id, reply)
        return []

    def take_over_free(self, stage: Stage, session: str, max_requests: int) -> list[TakenOver]:
        """Take over at most `max_requests` free requests of a stage.

        If this raises it is unknown which were taken: the session has to end, so that other workers can take them over.
        """
        pipeline = self._pipeline
        keys = [pipeline.free_key(stage), pipeline.sessions_key, pipeline.held_key(session)]
        key_formats = [pipeline.record_key("%s"), pipeline.log_key("%s")]
        args: Args = [session, stage, max_requests, self._longest_ms, self._pending_ms, START_HASH, *key_formats]
        (taken,) = TAKE.run_once(self._client, [TAKE.command(keys, args)])
        logs = self._read_logs([(name.decode(), reply) for name, reply, _ in taken])
        return [
            TakenOver(self._parse_claim(name.decode(), stage, reply, log), message)
            for (name, reply, message), log in zip(taken, logs, strict=True)
        ]

    def _parse_claim(self, request_id: str, stage: Stage, reply: Sequence[Any], log: Any) -> Claim:
        keys, channel = self._request_keys(request_id), self._pipeline.live_channel(request_id)
        _, epoch, num_tokens, rolled, ended, cancelled, attempts, most_tokens, reading, num_returns = reply
        events, damage = list[TokenEvent | EndEvent](), ""
        lock: Literal["", "missing", "erased"] = ""
        try:
            rolling_hash, events = rolled.decode(), parse_entries(log, request_id)
            if rolling_hash.encode() == SEALED_HASH:
                rolling_hash = next(one.id.partition("-")[2] for one in reversed(events) if isinstance(one, TokenEvent))
        # Only this request is damaged, or encrypted: the other claims go on.
        except (StreamError, UnicodeDecodeError, StopIteration, ContentErased, TenantKeyMissing) as error:
            rolling_hash, damage = START_HASH, f"its record or log cannot be read ({type(error).__name__})"
            is_missing = isinstance(error, TenantKeyMissing)
            lock = "missing" if is_missing else "erased" if isinstance(error, ContentErased) else ""
        return Claim(
            id=request_id,
            stage=stage,
            epoch=epoch,
            num_tokens=num_tokens,
            rolling_hash=rolling_hash,
            is_ended=bool(ended),
            is_unbound=ended == 2,
            is_cancelled=bool(cancelled),
            attempts=attempts,
            is_exhausted=attempts > self._settings.max_attempts,
            log=events,
            damage=damage,
            lock=lock,
            append_head=encode_append_head(keys, channel, self._pending_ms, epoch, num_tokens),
            most_tokens=most_tokens,
            is_read_raw=not reading,
            num_returns=num_returns,
        )

    def append_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> list[AppendOutcome]:
        """Append one token to each claim's log in one round trip. Return the outcomes in the order of the entries."""
        self.send_tokens(entries)
        return self.collect_outcomes()

    def send_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        """Send tokens to their logs and return at once. Their claims' `num_tokens` and hash move on.

        May be called again before `collect_outcomes`, also for the same claims.
        """
        self._appends.send_tokens(entries)

    def collect_outcomes(self, *, waits: bool = True) -> list[AppendOutcome]:
        """Return the outcomes of all tokens sent since the last call, in that order; unless it `waits`, only those of
        the first that have come.

        A lost connection is opened again, and tokens without a reply are sent again: the script recognises a token that
        was written. If that fails too, raise `redis.ConnectionError` or `redis.TimeoutError` and keep the tokens, so
        that this may be called again.
        """
        return self._appends.collect_outcomes(waits=waits)

    def wait_for_outcome(self, timeout_s: float) -> bool:
        """Return whether `collect_outcomes` finds a reply within a time, or a connection to open again."""
        return self._appends.wait_for_outcome(timeout_s)

    def forget_sent_tokens(self) -> None:
        """Give up the tokens that were sent: the next claim finds out whether they were written."""
        self._appends.forget_sent()

    def finish_request(self, claim: Claim, end: EndEvent, name: str = "") -> AppendOutcome:
        """Append the end event. Collect the claim's tokens first. May be repeated.

        `name` is the name of the request's own message where the caller has its delivery, with which it settles the
        result: it is bound to the request.

        The number of events in the log becomes the usage's `completion_tokens`, or the end's `pieces` where it has any:
        readers rely on it. The record is kept for `keep_s`, and for the time that the request took since it was
        published, because a second message of its id may wait for as long.
        """
        return self.finish_all([(claim, end, name)])[0]

    def finish_all(self, ends: Sequence[tuple[Claim, EndEvent, str]]) -> list[AppendOutcome]:
        """Append the ends of several requests in one round trip, see `finish_request`."""
        calls = [(self._request_keys(claim.id), self._finish_args(claim, end, name)) for claim, end, name in ends]
        return self._run_for_all(FINISH, [claim for claim, *_ in ends], calls)

    def _finish_args(self, claim: Claim, end: EndEvent, name: str) -> list[str | int | bytes]:
        event, keep_ms = self._complete_end(claim, end, name)
        channel, entry = self._pipeline.live_channel(claim.id), event.encode()
        entry = entry if claim.sealer is None else seal_end(claim.sealer, entry)
        remembered = self._pipeline.ended_key("%d", "%s"), self._settings.remember_days
        told: Args = [claim.epoch, claim.num_tokens, entry, keep_ms, claim.id, self._held, name]
        return [channel, *told, *remembered]

    def _complete_end(self, claim: Claim, end: EndEvent, name: str) -> tuple[EndEvent, int]:
        """Return the end event with the number of tokens, and how long the record is kept from now on, in ms."""
        if end.pieces is None and end.usage.completion_tokens != claim.num_tokens:
            end = end.model_copy(update={"usage": end.usage.model_copy(update={"completion_tokens": claim.num_tokens})})
        elif end.pieces not in (None, claim.num_tokens):
            end = end.model_copy(update={"pieces": claim.num_tokens})
        times = end.timings
        took_ms = round(max(0.0, times.finished - times.published) * 1000) if times.published > 0 else 0
        is_settled_here = claim.stage == "decode" or name != ""  # else a decode worker has to find the vectors
        is_short = end.vectors is not None and is_settled_here and "keep_s" not in self._settings.model_fields_set
        keep_ms = min(self._keep_ms, KEEP_VECTORS_MS) if is_short else self._keep_ms
        return end, keep_ms + min(took_ms, self._pending_ms)

    def note_all_handed_off(self, claims: Sequence[Claim]) -> list[bool]:
        """Pass requests on to the other stage, and end the claims, in one round trip: as a job that is durable, or with
        the bound job, which decode gave back or gives back now. Return for each False if it is not held any more.
        """
        free = list(map(self._pipeline.free_key, STAGES))
        calls: list[Call] = [
            ([self._pipeline.record_key(claim.id), *free], [claim.id, claim.epoch, self._held]) for claim in claims
        ]
        return [outcome is AppendOutcome.OK for outcome in self._run_for_all(HANDED, claims, calls)]

    def release_claim(self, claim: Claim, *, failed: bool = False, delivered: bool = True, wait_s: float = 0.0) -> bool:
        """Give an unfinished request back, to be claimed after `wait_s`. Return False if it was lost or given back
        before.

        With `failed` the attempt counts; without, the worker only stops. Where the request was `delivered`, for a lease
        only the next holder of the delivery may claim it. After that, or at once without a delivery, any worker may
        take it over.
        """
        call = self._release_call(claim, failed=failed, delivered=delivered, wait_s=wait_s)
        return self._run_for_all(RELEASE, [claim], [call]) == [AppendOutcome.OK]

    def release_all(self, claims: Sequence[tuple[Claim, bool]]) -> list[bool]:
        """Release several claims, each with whether it was delivered, in one round trip, see `release_claim`."""
        calls = [self._release_call(claim, delivered=delivered) for claim, delivered in claims]
        outcomes = self._run_for_all(RELEASE, [claim for claim, _ in claims], calls)
        return [outcome is AppendOutcome.OK for outcome in outcomes]

    def _release_call(self, claim: Claim, *, failed: bool = False, delivered: bool = True, wait_s: float = 0.0) -> Call:
        keys = [self._pipeline.record_key(claim.id), self._pipeline.free_key(claim.stage)]
        grace_ms = self._lease_ms if delivered else 0
        return keys, [claim.id, claim.epoch, int(failed), round(wait_s * 1000), grace_ms, self._held]

    def _run_for_all(self, script: Script, claims: Sequence[Claim], calls: Sequence[Call]) -> list[AppendOutcome]:
        """Run a script for each claim, in one round trip."""
        replies = script.run_all(self._client, calls)
        return [
            AppendOutcome.REFUSED if self._note_refusal(claim.id, reply) else AppendOutcome(reply)
            for claim, reply in zip(claims, replies, strict=True)
        ]

    def _note_refusal(self, request_id: str, reply: Any) -> bool:
        """Return whether a reply is an error about this request alone.

        Raise `StateMismatch` if a key that all share may be the reason.
        """
        if not isinstance(reply, redis.ResponseError):
            return False
        check_server_key_types(self._client, self._pipeline.list_key_types())
        log.error("request %s: Redis refused to change its record: %s", request_id, reply)
        return True

    # Sessions, see `penstock.record.session`.

    def renew_session(
        self,
        session: str,
        until_ms: int = 0,
        partitions: Sequence[str] = (),
        dropped: Sequence[str] = (),
        beside: Sequence[ScriptCall] = (),
    ) -> Renewed | None:
        """Renew a session, which reads `partitions` and no longer those in `dropped`. Return None if it is over.

        `until_ms` is when it expires, as far as its worker knows; 0 for a new session. The calls `beside` are made on
        the same server in the same round trip.
        """
        pipeline = self._pipeline
        keys = [pipeline.sessions_key, pipeline.news_key(session), pipeline.readers_key]
        args: Args = [session, self._lease_ms, until_ms, len(partitions), *partitions, *dropped]
        renewal = ScriptCall(RENEW, keys, args)
        run_together(self._client, [renewal, *beside])
        reply = renewal.read_reply()
        if not reply:
            return None
        until, now, *news = reply
        return Renewed(until, now, [word.decode().removeprefix("c:") for word in news])

    def end_expired_sessions(self, as_of_ms: int, session: str = "") -> dict[Stage, int]:
        """End the sessions that had expired at `as_of_ms`, and `session` in any case: the requests they held are free.

        Return how many requests of each stage are free now.
        """
        pipeline = self._pipeline
        key_formats = [pipeline.held_key("%s"), pipeline.news_key("%s"), pipeline.record_key("%s")]
        keys = [pipeline.sessions_key, *map(pipeline.free_key, STAGES)]
        args: Args = [as_of_ms, self._lease_ms, session, *key_formats]
        *num_free, ended = REAP.run(self._client, keys, args)
        for one in ended:
            log.info("session %s has ended, its requests are free", one.decode())
        return dict(zip(STAGES, num_free, strict=True))

    def find_unnamed_partitions(self, partitions: Sequence[str]) -> list[str]:
        """Return those of `partitions` that no session has named as one that it reads."""
        if not partitions:
            return []
        readers = self._client.hmget(self._pipeline.readers_key, list(partitions))
        return [part for part, reader in zip(partitions, readers, strict=True) if reader is None]

    def adopt_partitions(self, session: str, topics: Sequence[str], unnamed: Sequence[str] = ()) -> list[str]:
        """Adopt the partitions of `topics` that no session reads, and those in `unnamed` that no session has named
        meanwhile.

        Return all partitions of these topics that this session reads.
        """
        keys = [self._pipeline.readers_key, self._pipeline.sessions_key]
        args: Args = [session, len(topics), *topics, *unnamed]
        return [part.decode() for part in ADOPT.run(self._client, keys, args)]

    def disown_partitions(self, session: str, partitions: Sequence[str]) -> None:
        """Give up all partitions: those in `partitions` go to other members, the others are adopted."""
        DISOWN.run(self._client, [self._pipeline.readers_key], [session, *partitions])

    def count_free(self, stage: Stage) -> int:
        """Return how many requests of a stage any worker may take over now."""
        seconds, microseconds = self._client.time()
        return self._client.zcount(self._pipeline.free_key(stage), "-inf", seconds * 1000 + microseconds // 1000)

    # Reading.

    def cancel_request(self, request_id: str) -> bool:
        """Cancel a request, also before any worker has read it. Return False if it has ended already."""
        return self._log.cancel_request(request_id)

    def read_log(self, request_id: str, after_position: int = -1) -> list[TokenEvent | EndEvent]:
        """Return the events in the log after the token at `after_position` (-1: from the beginning)."""
        return self._log.read_events(request_id, after_position)

    def read_status(self, request_id: str) -> RequestStatus | None:
        """Return a request's record, or None where there is none."""
        return self._log.read_status(request_id)

    def close(self) -> None:
        """Free the connection of the appends. The client stays the caller's."""
        self._appends.close()

    def _request_keys(self, request_id: str) -> list[str]:
        return [self._pipeline.record_key(request_id), self._pipeline.log_key(request_id)]


def check_server_key_types(client: "redis.Redis", expected: Mapping[str, str], server: str = "") -> None:
    """Raise `StateMismatch` if a key of one server has another type than the expected one, and `redis.RedisError`."""
    with client.pipeline(transaction=False) as pipe:
        for key in expected:
            pipe.type(key)
        found = [kind.decode() for kind in execute_pipeline(pipe)]
    where = f" {server}" if server else ""
    for (key, kind), other in zip(expected.items(), found, strict=True):
        if other not in (kind, "none"):
            raise StateMismatch(
                f"the key {key} on Redis{where} is a {other}, and this version expects a {kind}: another version or "
                f"program left it. Stop all workers of the pipeline, delete it (redis-cli DEL {key}), and start them"
            )
