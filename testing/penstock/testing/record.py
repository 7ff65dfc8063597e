"""`Record` in memory. `transitions` changes one request; this module keeps many requests, as a server does."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby

from penstock.config.settings import RecordSettings
from penstock.messages import EndEvent, TokenEvent
from penstock.names import STAGES, START_HASH, Stage
from penstock.pace import ServerPace
from penstock.record import AppendOutcome, Bound, Busy, Claim, Conflict, Record, RequestStatus, UnclaimedMessage
from penstock.record.claim import TakenOver
from penstock.record.record import Renewed
from penstock.redis.scripts import ScriptCall
from penstock.testing import transitions

RequestRecord = transitions.RequestRecord[str, bytes, TokenEvent, EndEvent]
NEW: RequestRecord = RequestRecord()
DAY_MS = 86_400_000


class MemoryRecords:
    """The content of the server of a pipeline's records. Several `MemoryRecord` may share it, on any threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.records: dict[str, RequestRecord] = {}
        self.expires_ms: dict[str, int] = {}
        """The time at which each record expires."""
        self.ended: dict[str, tuple[RequestRecord, int]] = {}
        """Records of ended requests with a bound message, and until which time in ms their ids are remembered."""
        self.sessions: dict[str, int] = {}
        """The time in ms until which each session lasts."""
        self.free: dict[Stage, dict[str, int]] = {"prefill": {}, "decode": {}}
        """The time in ms from which on any worker may take a request over."""
        self.readers: dict[str, str] = {}
        """By partition the session that reads it, or an empty string."""
        self.cancelled: dict[str, list[str]] = {}
        """By session the ids of cancelled requests that it has not heard of."""
        self._listeners: dict[str, list[Callable[[bytes], object]]] = {}

    def now_ms(self) -> int:
        """Return the time by the clock of the records, in ms."""
        return time.time_ns() // 1_000_000

    def find(self, request_id: str) -> RequestRecord | None:
        """Return a request's record, or None where there is none, or its time is over."""
        found = self.records.get(request_id)
        if found is not None and self.expires_ms[request_id] <= self.now_ms():
            del self.records[request_id]
            return None
        return found

    def remember_end(self, request_id: str, rec: RequestRecord, days: int) -> None:
        """Remember the id of an ended request until so many days are over after this one."""
        if days > 0 and rec.bound:
            self.ended[request_id] = rec, (self.now_ms() // DAY_MS + days + 1) * DAY_MS

    def find_ended(self, request_id: str) -> RequestRecord | None:
        """Return the last record of an ended request that is remembered."""
        rec, until_ms = self.ended.get(request_id, (None, 0))
        return rec if until_ms > self.now_ms() else None

    @contextmanager
    def listen(self, request_id: str, deliver: Callable[[bytes], object]) -> Iterator[None]:
        """Call `deliver` with the JSON of each event of a request that is written while the context lasts."""
        with self.lock:
            listeners = self._listeners.setdefault(request_id, [])
            listeners.append(deliver)
        try:
            yield
        finally:
            with self.lock:
                listeners.remove(deliver)
                if not listeners:
                    self._listeners.pop(request_id, None)

    def put(self, request_id: str, rec: RequestRecord, keep_ms: int | None = None) -> None:
        """Put a request's next record in the place of the one before, and keep it from now on for `keep_ms`."""
        before, self.records[request_id] = self.records.get(request_id), rec
        if keep_ms is not None:
            self.expires_ms[request_id] = self.now_ms() + keep_ms
        for deliver in self._listeners.get(request_id, ()):
            for event in _list_events(rec)[0 if before is None else len(_list_events(before)) :]:
                deliver(event.encode())
        if before is None or before.free is not rec.free:
            for stage, from_ms in zip(STAGES, rec.free, strict=True):
                if from_ms:
                    self.free[stage][request_id] = from_ms
                else:
                    self.free[stage].pop(request_id, None)


class MemoryRecord(Record):
    """The records of one pipeline's requests, in memory."""

    # `Record`'s own constructor needs a client. The inherited methods need none: `tests/record/test_double.py`.
    def __init__(self, records: MemoryRecords, settings: RecordSettings) -> None:
        self._records, self._settings = records, settings
        self._lock: AbstractContextManager[object] = records.lock
        self.pace = ServerPace()
        self._longest_ms = round((settings.retry_cap_s + settings.lease_s) * 1000)
        self._keep_ms = round(settings.keep_s * 1000)
        self._pending_ms = round(settings.pending_keep_s * 1000)
        self._sent: list[tuple[Claim, int, str, AppendOutcome]] = []
        """Tokens whose outcomes are not collected: the claim, the position, the hash before it, and the outcome."""

    # Requests.

    def claim_all(
        self, stage: Stage, session: str, waiting: Sequence[UnclaimedMessage]
    ) -> list[Claim | Busy | Bound | Conflict]:
        with self._lock:
            found = [self._claim(stage, session, one) for one in waiting]
        assert None not in found, "only a message that is parked has no outcome"
        return [one for one in found if one is not None]

    def park_messages(self, stage: Stage, waiting: Sequence[UnclaimedMessage]) -> list[UnclaimedMessage]:
        with self._lock:
            for one in waiting:
                self._claim(stage, "", one)
        return []

    def _claim(self, stage: Stage, session: str, asked: UnclaimedMessage) -> Claim | Busy | Bound | Conflict | None:
        """Claim a request, or park it where `session` is empty; then the outcome is None."""
        before, living = self._find_known(asked.id, stage), self._records.sessions
        told = asked.name, asked.body_hash, asked.message
        is_answered = asked.since_result_s < self._settings.keep_s
        rec, reply = transitions.claim_request(
            before, stage, session or None, told, living, self._read_times(), is_answered=is_answered
        )
        if rec is not before:
            self._records.put(asked.id, rec, None if rec.stage == "end" else self._pending_ms)
            if rec.stage == "end":
                self._records.remember_end(asked.id, rec, self._settings.remember_days)
        match reply.kind:
            case "claim":
                return self._build_claim(asked.id, stage, rec)
            case "busy":
                return Busy(reply.wait_ms / 1000, rec.epoch)
            case "bound":
                return Bound()
            case "conflict":
                return Conflict()
        return None

    def _find_known(self, request_id: str, stage: Stage) -> RequestRecord:
        """Return a request's record; where it has expired, with what is remembered of it: jobs name no body."""
        found, told = self._records.find(request_id) or NEW, self._records.find_ended(request_id)
        if self._settings.remember_days == 0 or told is None or found.stage != "new":
            return found
        return found._replace(bound=told.bound, body=told.body if stage == "prefill" else None)

    def _read_times(self) -> transitions.Times:
        now_ms = self._records.now_ms()
        return transitions.Times(now_ms, now_ms, self._lease_ms, self._longest_ms)

    def take_over_free(self, stage: Stage, session: str, max_requests: int) -> list[TakenOver]:
        taken: list[TakenOver] = []
        with self._lock:
            times, free = self._read_times(), self._records.free[stage]
            if session not in self._records.sessions:
                return []
            due = sorted((from_ms, name) for name, from_ms in free.items() if from_ms <= times.now_ms)
            due = due or [
                (from_ms, name) for name, from_ms in free.items() if from_ms > times.now_ms + self._longest_ms
            ]
            for _, name in due[:max_requests]:
                del free[name]
                if (before := self._records.find(name)) is not None:
                    rec, is_taken = transitions.take_over_request(before, stage, session, times)
                    self._records.put(name, rec, self._pending_ms if is_taken else None)
                    if is_taken:
                        taken.append(TakenOver(self._build_claim(name, stage, rec), rec.message or b""))
        return taken

    def _build_claim(self, request_id: str, stage: Stage, rec: RequestRecord) -> Claim:
        return Claim(
            id=request_id,
            stage=stage,
            epoch=rec.epoch,
            num_tokens=len(rec.tokens),
            rolling_hash=rec.tokens[-1].id.partition("-")[2] if rec.tokens else START_HASH,
            is_ended=rec.stage == "end",
            is_unbound=rec.stage == "end" and stage == "prefill" and not rec.bound,
            is_cancelled=rec.cancelled,
            attempts=rec.attempts,
            is_exhausted=rec.attempts > self._settings.max_attempts,
            most_tokens=rec.most if rec.stage == stage else 0,
            num_returns=rec.num_returns,
            log=_list_events(rec),
        )

    def send_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        with self._lock:
            for claim, tokens in groupby(entries, lambda entry: entry[0]):
                events = tuple(event for _, event in tokens)
                position, rolled = int(events[0].id.partition("-")[0]), events[-1].id.partition("-")[2]
                before = self._records.find(claim.id) or NEW
                rec, outcome = transitions.append_tokens(before, claim.epoch, position, events)
                if rec is not before:
                    self._records.put(claim.id, rec)
                self._sent += [(claim, position, claim.rolling_hash, outcome)] * len(events)
                claim.num_tokens, claim.rolling_hash = position + len(events), rolled

    def collect_outcomes(self, *, waits: bool = True) -> list[AppendOutcome]:
        sent, self._sent = self._sent, []
        for claim, position, hash_before, outcome in sent:
            if outcome is AppendOutcome.CANCELLED and position < claim.num_tokens:
                claim.num_tokens, claim.rolling_hash = position, hash_before
        return [outcome for *_, outcome in sent]

    def wait_for_outcome(self, timeout_s: float) -> bool:
        return True

    def forget_sent_tokens(self) -> None:
        self._sent = []

    def finish_all(self, ends: Sequence[tuple[Claim, EndEvent, str]]) -> list[AppendOutcome]:
        with self._lock:
            return [self._finish(claim, end, name) for claim, end, name in ends]

    def _finish(self, claim: Claim, end: EndEvent, name: str) -> AppendOutcome:
        before, (end, keep_ms) = self._records.find(claim.id) or NEW, self._complete_end(claim, end, name)
        end.encode()  # raises for text that cannot be encoded, as the record in Redis does
        rec, outcome = transitions.finish_request(before, claim.epoch, claim.num_tokens, end, name)
        if rec is not before:
            self._records.put(claim.id, rec, keep_ms)
            if rec.stage == "end":
                self._records.remember_end(claim.id, rec, self._settings.remember_days)
        return outcome

    def note_all_handed_off(self, claims: Sequence[Claim]) -> list[bool]:
        def note(claim: Claim) -> bool:
            before = self._records.find(claim.id) or NEW
            rec, is_noted = transitions.hand_off_request(before, claim.epoch, self._records.now_ms())
            if is_noted:
                self._records.put(claim.id, rec)
            return is_noted

        with self._lock:
            return [note(claim) for claim in claims]

    def release_claim(self, claim: Claim, *, failed: bool = False, delivered: bool = True, wait_s: float = 0.0) -> bool:
        with self._lock:
            before, now_ms = self._records.find(claim.id) or NEW, self._records.now_ms()
            wait_ms, alone_ms = round(wait_s * 1000), self._lease_ms if delivered else 0
            rec, is_released = transitions.release_request(
                before, claim.epoch, now_ms, wait_ms=wait_ms, alone_ms=alone_ms, failed=failed
            )
            if is_released:
                self._records.put(claim.id, rec)
            return is_released

    def release_all(self, claims: Sequence[tuple[Claim, bool]]) -> list[bool]:
        return [self.release_claim(claim, delivered=delivered) for claim, delivered in claims]

    # Sessions.

    def renew_session(
        self,
        session: str,
        until_ms: int = 0,
        partitions: Sequence[str] = (),
        dropped: Sequence[str] = (),
        beside: Sequence[ScriptCall] = (),
    ) -> Renewed | None:
        assert not beside, "a script needs a server"
        with self._lock:
            now_ms, living = self._records.now_ms(), self._records.sessions
            went_back = until_ms > now_ms + 1.5 * self._lease_ms
            if until_ms > 0 and (session not in living or (living[session] < until_ms and not went_back)):
                return None
            living[session] = now_ms + self._lease_ms
            readers = self._records.readers
            readers.update(dict.fromkeys(partitions, session))
            readers.update({part: "" for part in dropped if readers.get(part) == session})
            cancelled = self._records.cancelled.pop(session, [])
            return Renewed(living[session], now_ms, cancelled)

    def end_expired_sessions(self, as_of_ms: int, session: str = "") -> dict[Stage, int]:
        with self._lock:
            now_ms, living = self._records.now_ms(), self._records.sessions
            for name, until_ms in living.items():
                if until_ms > now_ms + 2 * self._lease_ms:
                    living[name] = now_ms + self._lease_ms
            over = [name for name, until_ms in living.items() if until_ms < as_of_ms] + [session] * bool(session)
            for name in over:
                for request_id, rec in self._records.records.items():
                    if rec.session == name:
                        self._records.put(request_id, transitions.end_session(rec, now_ms))
                self._records.cancelled.pop(name, None)
                living.pop(name, None)
            return {stage: self._count_free(stage, now_ms) for stage in STAGES}

    def find_unnamed_partitions(self, partitions: Sequence[str]) -> list[str]:
        with self._lock:
            return [part for part in partitions if part not in self._records.readers]

    def adopt_partitions(self, session: str, topics: Sequence[str], unnamed: Sequence[str] = ()) -> list[str]:
        with self._lock:
            living, readers = self._records.sessions, self._records.readers
            if session not in living:
                return []
            for part in unnamed:
                readers.setdefault(part, session)
            mine = [part for part in readers if part.rpartition(":")[0] in topics]
            readers.update({part: session for part in mine if readers[part] not in living})
            return [part for part in mine if readers[part] == session]

    def disown_partitions(self, session: str, partitions: Sequence[str]) -> None:
        with self._lock:
            readers = self._records.readers
            for part in [part for part in partitions if readers.get(part) == session]:
                del readers[part]
            readers.update({part: "" for part, reader in readers.items() if reader == session})

    def count_free(self, stage: Stage) -> int:
        with self._lock:
            return self._count_free(stage, self._records.now_ms())

    def _count_free(self, stage: Stage, now_ms: int) -> int:
        return sum(from_ms <= now_ms for from_ms in self._records.free[stage].values())

    # Reading.

    def cancel_request(self, request_id: str) -> bool:
        with self._lock:
            before = self._records.find(request_id)
            rec, is_open = transitions.cancel_request(before or NEW)
            if is_open:
                self._records.put(request_id, rec, self._pending_ms if before is None else None)
                if rec.session and before is not None and not before.cancelled:
                    self._records.cancelled.setdefault(rec.session, []).append(request_id)
            return is_open

    def read_log(self, request_id: str, after_position: int = -1) -> list[TokenEvent | EndEvent]:
        with self._lock:
            rec = self._records.find(request_id)
            return [] if rec is None else _list_events(rec)[after_position + 1 :]

    def is_remembered(self, request_id: str) -> bool:
        """Return whether a request has ended and its record has expired, see `AsyncTokenLog.is_remembered`."""
        with self._lock:
            found = self._records.find(request_id)
            is_known = self._settings.remember_days > 0 and self._records.find_ended(request_id) is not None
            return is_known and (found is None or found.stage == "new")

    def read_status(self, request_id: str) -> RequestStatus | None:
        with self._lock:
            rec = self._records.find(request_id)
            if rec is None:
                return None
            return RequestStatus(
                epoch=rec.epoch,
                session=rec.session or "",
                stage=rec.stage,
                bound=rec.bound or "",
                body=rec.body or "",
                num_tokens=len(rec.tokens),
                attempts=rec.attempts,
                cancelled=rec.cancelled,
            )

    def close(self) -> None:
        pass


def _list_events(rec: RequestRecord) -> list[TokenEvent | EndEvent]:
    return [*rec.tokens, *([rec.end] if rec.end is not None else [])]
