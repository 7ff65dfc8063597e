"""`Record` in memory. Each method does what its script in `penstock.record` does, which tells the reasons."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from penstock.config.settings import RecordSettings
from penstock.messages import EndEvent, TokenEvent
from penstock.names import START_HASH, Stage
from penstock.record import AppendOutcome, Bound, Busy, Claim, Conflict, Record, RequestStatus, UnclaimedMessage
from penstock.record.claim import GOOD_PROGRESS, TakenOver
from penstock.record.log import RecordStage
from penstock.record.record import Renewed
from penstock.redis.scripts import ScriptCall


@dataclass
class RequestRecord:
    """A request's record and its log. Times are in ms by the clock of `MemoryRecords`."""

    epoch: int = 0
    session: str = ""
    stage: RecordStage = "new"
    bound: str = ""
    body: str = ""
    attempts: int = 0
    num_found: int = 0
    """How many tokens there were when it was claimed."""
    most: int = 0
    """The most tokens that a claim in this stage made."""
    cancelled: bool = False
    message: bytes = b""
    not_before_ms: int = 0
    rolling_hash: str = START_HASH
    tokens: list[TokenEvent] = field(default_factory=list)
    end: EndEvent | None = None
    expires_ms: int = 0


class MemoryRecords:
    """What the server of a pipeline's records holds. Several `MemoryRecord` may share it, on any threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.records: dict[str, RequestRecord] = {}
        self.sessions: dict[Stage, dict[str, int]] = {"prefill": {}, "decode": {}}
        """The time in ms until which each session lasts."""
        self.free: dict[Stage, dict[str, int]] = {"prefill": {}, "decode": {}}
        """The time in ms from which on any worker may take a request over."""
        self.readers: dict[Stage, dict[str, str]] = {"prefill": {}, "decode": {}}
        self.cancelled: dict[str, list[str]] = {}
        """By session the ids of cancelled requests that it has not heard of."""

    def now_ms(self) -> int:
        """Return the time by the clock of the records, in ms."""
        return time.time_ns() // 1_000_000

    def find(self, request_id: str) -> RequestRecord | None:
        """Return a request's record, or None where there is none, or its time is over."""
        found = self.records.get(request_id)
        if found is not None and found.expires_ms <= self.now_ms():
            del self.records[request_id]
            return None
        return found


class MemoryRecord(Record):
    """The records of one pipeline's requests, in memory."""

    # `Record`'s own constructor wants a client. What is inherited does without one: `tests/record/test_double.py`.
    def __init__(self, records: MemoryRecords, settings: RecordSettings) -> None:
        self._records, self._lock, self._settings = records, records.lock, settings
        self._lease_ms = round(settings.lease_s * 1000)
        self._longest_ms = round(settings.retry_cap_s * 1000) + self._lease_ms
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
        now_ms, prefill = self._records.now_ms(), stage == "prefill"
        rec = self._records.find(asked.id) or RequestRecord()
        if (settled := _find_other_message(rec, stage, asked)) is not None:
            return settled
        if not session and (rec.stage == "end" or (rec.stage == stage and rec.message)):
            return None
        if rec.stage == "end":
            if prefill:
                rec.epoch = max(rec.epoch + 1, now_ms)
            else:
                rec.bound = asked.job_id
            return self._build_claim(asked.id, stage, rec)
        if (busy := self._find_holder(rec, stage, session, now_ms)) is not None:
            return busy
        attempts = 0 if not prefill and rec.stage == "prefill" else rec.attempts
        rec.most = rec.most if rec.stage == stage else 0
        rec.epoch, rec.session, rec.stage = max(rec.epoch + 1, now_ms), session, stage
        rec.attempts, rec.not_before_ms, rec.message = attempts + bool(session), 0, asked.message
        rec.num_found, rec.expires_ms = len(rec.tokens), now_ms + self._pending_ms
        rec.body = asked.body_hash or rec.body
        if not prefill:
            rec.bound = asked.job_id
        self._records.records[asked.id] = rec
        if not session:
            self._records.free[stage][asked.id] = now_ms
            return None
        self._records.free[stage].pop(asked.id, None)
        return self._build_claim(asked.id, stage, rec)

    def _find_holder(self, rec: RequestRecord, stage: Stage, session: str, now_ms: int) -> Busy | None:
        """Return for how long the request is not to be claimed; None if it is."""
        living = self._records.sessions[stage]
        if session and session not in living:
            return Busy(self._lease_ms / 3000)
        if stage == "decode" and rec.stage == "prefill":
            return None
        if rec.session in living:
            return Busy(max(self._lease_ms / 4, min(living[rec.session] - now_ms, self._lease_ms)) / 1000)
        wait_ms = rec.not_before_ms - now_ms
        return Busy(wait_ms / 1000) if 0 < wait_ms <= self._longest_ms else None

    def take_over_free(self, stage: Stage, session: str, max_requests: int) -> list[TakenOver]:
        taken: list[TakenOver] = []
        with self._lock:
            now_ms, free = self._records.now_ms(), self._records.free[stage]
            if session not in self._records.sessions[stage]:
                return []
            due = sorted((from_ms, name) for name, from_ms in free.items() if from_ms <= now_ms)
            due = due or [(from_ms, name) for name, from_ms in free.items() if from_ms > now_ms + self._longest_ms]
            for _, name in due[:max_requests]:
                del free[name]
                rec = self._records.find(name)
                if rec is not None and rec.stage == stage and not rec.session and rec.message:
                    rec.epoch, rec.session = max(rec.epoch + 1, now_ms), session
                    rec.not_before_ms, rec.expires_ms = 0, now_ms + self._pending_ms
                    rec.attempts, rec.num_found = rec.attempts + 1, len(rec.tokens)
                    taken.append(TakenOver(self._build_claim(name, stage, rec), rec.message))
        return taken

    def _build_claim(self, request_id: str, stage: Stage, rec: RequestRecord) -> Claim:
        return Claim(
            id=request_id,
            stage=stage,
            epoch=rec.epoch,
            num_tokens=len(rec.tokens),
            rolling_hash=rec.rolling_hash,
            is_ended=rec.stage == "end",
            is_cancelled=rec.cancelled,
            attempts=rec.attempts,
            is_exhausted=rec.attempts > self._settings.max_attempts,
            most_tokens=rec.most if rec.stage == stage else 0,
            log=_list_events(rec) if stage == "decode" else [],
        )

    def send_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        with self._lock:
            for claim, tokens in groupby(entries, lambda entry: entry[0]):
                events = [event for _, event in tokens]
                position, rolled = int(events[0].id.partition("-")[0]), events[-1].id.partition("-")[2]
                outcome = self._append(claim, position, rolled, events)
                self._sent += [(claim, position, claim.rolling_hash, outcome)] * len(events)
                claim.num_tokens, claim.rolling_hash = position + len(events), rolled

    def _append(self, claim: Claim, position: int, rolled: str, events: list[TokenEvent]) -> AppendOutcome:
        rec = self._records.find(claim.id)
        if rec is None or rec.epoch != claim.epoch:
            return AppendOutcome.FENCED
        if position < len(rec.tokens):
            written = rec.tokens[position : position + len(events)]
            return AppendOutcome.OK if written == events else AppendOutcome.FENCED
        if rec.stage == "end":
            return AppendOutcome.FENCED
        if rec.cancelled:
            return AppendOutcome.CANCELLED
        if position > len(rec.tokens):
            return AppendOutcome.FENCED
        rec.tokens += events
        rec.rolling_hash, made = rolled, len(rec.tokens) - rec.num_found
        if made > rec.most:
            rec.attempts, rec.most = 0, min(made, GOOD_PROGRESS)
        return AppendOutcome.OK

    def collect_outcomes(self) -> list[AppendOutcome]:
        sent, self._sent = self._sent, []
        for claim, position, hash_before, outcome in sent:
            if outcome is AppendOutcome.CANCELLED and position < claim.num_tokens:
                claim.num_tokens, claim.rolling_hash = position, hash_before
        return [outcome for *_, outcome in sent]

    def wait_for_outcome(self, timeout_s: float) -> bool:
        return True

    def forget_sent_tokens(self) -> None:
        self._sent = []

    def finish_all(self, ends: Sequence[tuple[Claim, EndEvent]]) -> list[AppendOutcome]:
        with self._lock:
            return [self._finish(claim, end) for claim, end in ends]

    def _finish(self, claim: Claim, end: EndEvent) -> AppendOutcome:
        rec = self._records.find(claim.id)
        if rec is None or rec.epoch != claim.epoch or len(rec.tokens) != claim.num_tokens:
            return AppendOutcome.FENCED
        if rec.stage == "end":
            return AppendOutcome.OK
        rec.end, keep_ms = self._complete_end(claim, end)
        rec.end.encode()  # raises for what cannot be written, as the record in Redis does
        rec.stage, rec.session, rec.message = "end", "", b""
        rec.expires_ms = self._records.now_ms() + keep_ms
        return AppendOutcome.OK

    def note_all_handed_off(self, claims: Sequence[Claim]) -> list[bool]:
        def note(claim: Claim) -> bool:
            rec = self._records.find(claim.id)
            if rec is None or rec.epoch != claim.epoch or rec.stage != "prefill":
                return False
            rec.stage, rec.session, rec.attempts, rec.message = "handed", "", 0, b""
            return True

        with self._lock:
            return [note(claim) for claim in claims]

    def release_claim(self, claim: Claim, *, failed: bool = False, delivered: bool = True, wait_s: float = 0.0) -> bool:
        with self._lock:
            rec = self._records.find(claim.id)
            if rec is None or rec.epoch != claim.epoch or rec.stage in ("end", "handed") or not rec.session:
                return False
            from_ms = self._records.now_ms() + round(wait_s * 1000)
            rec.session, rec.not_before_ms = "", from_ms if wait_s else 0
            self._records.free[claim.stage][claim.id] = from_ms + (self._lease_ms if delivered else 0)
            if not failed and rec.attempts > 0:
                rec.attempts -= 1
            return True

    def release_all(self, claims: Sequence[tuple[Claim, bool]]) -> list[bool]:
        return [self.release_claim(claim, delivered=delivered) for claim, delivered in claims]

    # Sessions.

    def renew_session(
        self,
        stage: Stage,
        session: str,
        until_ms: int = 0,
        partitions: Sequence[str] = (),
        dropped: Sequence[str] = (),
        beside: Sequence[ScriptCall] = (),
    ) -> Renewed | None:
        assert not beside, "a script needs a server"
        with self._lock:
            now_ms, living = self._records.now_ms(), self._records.sessions[stage]
            went_back = until_ms > now_ms + 1.5 * self._lease_ms
            if until_ms > 0 and (session not in living or (living[session] < until_ms and not went_back)):
                return None
            living[session] = now_ms + self._lease_ms
            readers = self._records.readers[stage]
            readers.update(dict.fromkeys(partitions, session))
            readers.update({part: "" for part in dropped if readers.get(part) == session})
            cancelled = self._records.cancelled.pop(session, [])
            return Renewed(living[session], now_ms, self._count_free(stage, now_ms), cancelled)

    def end_expired_sessions(self, stage: Stage, as_of_ms: int, session: str = "") -> int:
        with self._lock:
            now_ms, living = self._records.now_ms(), self._records.sessions[stage]
            for name, until_ms in living.items():
                if until_ms > now_ms + 2 * self._lease_ms:
                    living[name] = now_ms + self._lease_ms
            over = [name for name, until_ms in living.items() if until_ms < as_of_ms] + [session] * bool(session)
            for name in over:
                for request_id, rec in self._records.records.items():
                    if rec.session == name:
                        rec.session = ""
                        self._records.free[stage][request_id] = now_ms
                self._records.cancelled.pop(name, None)
                living.pop(name, None)
            return self._count_free(stage, now_ms)

    def find_unnamed_partitions(self, stage: Stage, partitions: Sequence[str]) -> list[str]:
        with self._lock:
            return [part for part in partitions if part not in self._records.readers[stage]]

    def adopt_partitions(self, stage: Stage, session: str, unnamed: Sequence[str] = ()) -> list[str]:
        with self._lock:
            living, readers = self._records.sessions[stage], self._records.readers[stage]
            if session not in living:
                return []
            for part in unnamed:
                readers.setdefault(part, session)
            readers.update({part: session for part, reader in readers.items() if reader not in living})
            return [part for part, reader in readers.items() if reader == session]

    def disown_partitions(self, stage: Stage, session: str, partitions: Sequence[str]) -> None:
        with self._lock:
            readers = self._records.readers[stage]
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
            rec = self._records.find(request_id)
            if rec is None:
                expires_ms = self._records.now_ms() + self._pending_ms
                rec = self._records.records[request_id] = RequestRecord(expires_ms=expires_ms)
            if rec.stage == "end":
                return False
            if rec.session and not rec.cancelled:
                self._records.cancelled.setdefault(rec.session, []).append(request_id)
            rec.cancelled = True
            return True

    def read_log(self, request_id: str, after_position: int = -1) -> list[TokenEvent | EndEvent]:
        with self._lock:
            rec = self._records.find(request_id)
            return [] if rec is None else _list_events(rec)[after_position + 1 :]

    def read_status(self, request_id: str) -> RequestStatus | None:
        with self._lock:
            rec = self._records.find(request_id)
            if rec is None:
                return None
            return RequestStatus(
                epoch=rec.epoch,
                session=rec.session,
                stage=rec.stage,
                bound=rec.bound,
                body=rec.body,
                num_tokens=len(rec.tokens),
                attempts=rec.attempts,
                cancelled=rec.cancelled,
            )

    def close(self) -> None:
        pass


def _list_events(rec: RequestRecord) -> list[TokenEvent | EndEvent]:
    return [*rec.tokens, *([rec.end] if rec.end is not None else [])]


def _find_other_message(rec: RequestRecord, stage: Stage, asked: UnclaimedMessage) -> Bound | Conflict | None:
    """Return why the message is not the one that settles the request; None if it may be."""
    if asked.body_hash and rec.body and rec.body != asked.body_hash:
        return Conflict()
    if (stage == "prefill" and rec.stage == "handed") or (rec.bound and rec.bound != asked.job_id):
        return Bound()
    return None
