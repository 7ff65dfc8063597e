"""Keeps a replay's record of a request: on a real server, or in the double of one."""

import json
from dataclasses import dataclass
from typing import Any, Protocol

import redis

from penstock.messages import EndEvent, TokenEvent
from penstock.names import STAGES, START_HASH, Pipeline, Stage
from penstock.testing.record import NEW, MemoryRecords, RequestRecord
from sim.protocol.script import DUE, LATER, NEVER

LEASE_S = 600.0
"""Longer than any test, so that a session ends only in steps of the model."""
_FIELDS = [
    "epoch", "session", "not_before", "stage", "bound", "body", "attempts", "cancelled", "message", "tokens", "hash",
]  # fmt: skip


@dataclass(frozen=True)
class RequestState:
    """A request's state in Redis: its record, its places among the free requests, and its log as JSON by entry."""

    epoch: int
    session: str
    waits: bool
    stage: str
    bound: str
    body: str
    attempts: int
    cancelled: bool
    message: bytes
    num_tokens: int
    rolling_hash: str
    free: tuple[int, int]
    log: list[tuple[str, Any]]


class Keeper(Protocol):
    """Keeps the record of one request: a replay reads and changes it here beside the record's methods."""

    def clear_free(self) -> None:
        """Remove all requests from the free ones of both stages: those of earlier replays, too."""

    def find_session_end(self, session: str) -> int | None:
        """Return until when a session lasts, in ms; None where it is over."""

    def expire_session(self, session: str) -> bool:
        """Let the time of a session run out. Return False where it is over already."""

    def is_held(self, session: str) -> bool:
        """Return whether the request is among those that a session holds."""

    def pass_waiting_times(self) -> None:
        """Let all times pass for which the request waits."""

    def save(self) -> None:
        """Remember the request's state."""

    def restore(self, sessions: set[str]) -> str:
        """Go back to the remembered state, and end all `sessions` but the one that holds the request by it.

        Return that session, or an empty string.
        """

    def now_ms(self) -> int:
        """Return the time by the keeper's clock."""

    def read(self) -> RequestState:
        """Return the request's state."""


class RedisKeeper:
    """A server, on which the scripts run."""

    def __init__(self, client: "redis.Redis", pipeline: Pipeline, request_id: str) -> None:
        self._client, self._pipeline, self._id = client, pipeline, request_id
        self._record, self._log = self._keys = pipeline.record_key(request_id), pipeline.log_key(request_id)
        self._saved: dict[Stage, float] = {}
        self._saved_keys: dict[str, bytes | None] = {}

    def clear_free(self) -> None:
        for stage in STAGES:
            self._client.delete(self._pipeline.free_key(stage))

    def find_session_end(self, session: str) -> int | None:
        lasts = self._client.zscore(self._pipeline.sessions_key, session)
        return None if lasts is None else int(lasts)

    def expire_session(self, session: str) -> bool:
        return bool(self._client.zadd(self._pipeline.sessions_key, {session: 1}, xx=True, ch=True))

    def is_held(self, session: str) -> bool:
        return bool(self._client.sismember(self._pipeline.held_key(session), self._id))

    def pass_waiting_times(self) -> None:
        if self._client.hexists(self._record, "not_before"):
            self._client.hset(self._record, "not_before", 1)
        for stage in STAGES:
            self._client.zadd(self._pipeline.free_key(stage), {self._id: 1}, xx=True)

    def save(self) -> None:
        self._saved_keys = {key: self._client.dump(key) for key in self._keys}
        scores = {stage: self._client.zscore(self._pipeline.free_key(stage), self._id) for stage in STAGES}
        self._saved = {stage: score for stage, score in scores.items() if score is not None}

    def restore(self, sessions: set[str]) -> str:
        for key in self._keys:
            saved = self._saved_keys.get(key)
            if saved is None:
                self._client.delete(key)
            else:
                self._client.restore(key, 0, saved, replace=True)
        self.clear_free()
        for stage, score in self._saved.items():
            self._client.zadd(self._pipeline.free_key(stage), {self._id: score})
        for session in sessions:
            self._client.zrem(self._pipeline.sessions_key, session)
            self._client.delete(self._pipeline.held_key(session))
        holder = str(self._client.hget(self._record, "session") or b"", "utf-8")  # type: ignore[arg-type]
        if holder:
            self._client.zadd(self._pipeline.sessions_key, {holder: self.now_ms() + 1000 * LEASE_S})
            self._client.sadd(self._pipeline.held_key(holder), self._id)
        return holder

    def now_ms(self) -> int:
        seconds, micros = self._client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def read(self) -> RequestState:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.hmget(self._record, _FIELDS)
            pipe.xrange(self._log)
            for stage in STAGES:
                pipe.zscore(self._pipeline.free_key(stage), self._id)
            pipe.time()
            values, entries, *scores, time = pipe.execute()
        text = {name: (value or b"").decode() for name, value in zip(_FIELDS, values, strict=True)}
        now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
        prefill, decode = [_place_time(score, now_ms) for score in scores]
        return RequestState(
            epoch=int(text["epoch"] or 0),
            session=text["session"],
            waits=int(text["not_before"] or 0) > now_ms,
            stage=text["stage"] or "new",
            bound=text["bound"],
            body=text["body"],
            attempts=int(text["attempts"] or 0),
            cancelled=text["cancelled"] == "1",
            message=text["message"].encode(),
            num_tokens=int(text["tokens"] or 0),
            rolling_hash=text["hash"] or START_HASH,
            free=(prefill, decode),
            log=[(name.decode(), json.loads(fields[b"e"])) for name, fields in entries],
        )


class MemoryKeeper:
    """The double of a server."""

    def __init__(self, records: MemoryRecords, request_id: str) -> None:
        self._records, self._id = records, request_id
        self._saved: RequestRecord | None = None

    def clear_free(self) -> None:
        for free in self._records.free.values():
            free.clear()

    def find_session_end(self, session: str) -> int | None:
        return self._records.sessions.get(session)

    def expire_session(self, session: str) -> bool:
        living = self._records.sessions
        if session in living:
            living[session] = 1
            return True
        return False

    def is_held(self, session: str) -> bool:
        found = self._records.find(self._id)
        return found is not None and found.session == session

    def pass_waiting_times(self) -> None:
        if (found := self._records.find(self._id)) is not None:
            prefill, decode = [min(1, from_ms) for from_ms in found.free]
            self._records.put(
                self._id, found._replace(not_before_ms=min(1, found.not_before_ms), free=(prefill, decode))
            )

    def save(self) -> None:
        self._saved = self._records.find(self._id)

    def restore(self, sessions: set[str]) -> str:
        self._records.records.pop(self._id, None)
        self.clear_free()
        for session in sessions:
            self._records.sessions.pop(session, None)
        if self._saved is None:
            return ""
        self._records.put(self._id, self._saved)
        if (holder := self._saved.session) is not None:
            self._records.sessions[holder] = self.now_ms() + round(1000 * LEASE_S)
        return holder or ""

    def now_ms(self) -> int:
        return self._records.now_ms()

    def read(self) -> RequestState:
        found, now_ms = self._records.find(self._id) or NEW, self.now_ms()
        prefill, decode = [_place_time(self._records.free[stage].get(self._id), now_ms) for stage in STAGES]
        log: list[tuple[str, TokenEvent | EndEvent]] = [(f"{at}-1", event) for at, event in enumerate(found.tokens)]
        log += [(f"{len(found.tokens)}-2", found.end)] if found.end is not None else []
        return RequestState(
            epoch=found.epoch,
            session=found.session or "",
            waits=found.not_before_ms > now_ms,
            stage=found.stage,
            bound=found.bound or "",
            body=found.body or "",
            attempts=found.attempts,
            cancelled=found.cancelled,
            message=found.message or b"",
            num_tokens=len(found.tokens),
            rolling_hash=found.tokens[-1].id.partition("-")[2] if found.tokens else START_HASH,
            free=(prefill, decode),
            log=[(name, json.loads(event.encode())) for name, event in log],
        )


def _place_time(from_ms: float | None, now_ms: int) -> int:
    """Return when a request is free, as the model says it."""
    return NEVER if from_ms is None else LATER if from_ms > now_ms else DUE
