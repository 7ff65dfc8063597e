"""The model's steps, taken by the real scripts on a real server: replies and records have to agree after each."""

import json
from typing import Any

import redis

from penstock.messages import EndEvent, TokenEvent, Usage
from penstock.names import STAGES, START_HASH, Pipeline, Stage, event_id, roll_hash
from penstock.record import Bound, Busy, Claim, Conflict, Record, UnclaimedMessage
from sim.protocol.script import DUE, GHOST, LATER, NEVER, NOBODY, PLACES, Message, Rec, Reply

LEASE_S = 600.0
"""Longer than any test: a session is over when the model says so."""
_FIELDS = [
    "epoch", "session", "not_before", "stage", "bound", "body", "attempts", "cancelled", "message", "tokens", "hash",
]  # fmt: skip


def token_of(epoch: int, position: int) -> int:
    """The token that the holder of an epoch draws for a position: no other draws it."""
    return epoch * 16 + position


def hash_of(tokens: tuple[int, ...]) -> str:
    """The rolling hash after a log."""
    rolled = START_HASH
    for position, epoch in enumerate(tokens):
        rolled = roll_hash(rolled, token_of(epoch, position))
    return rolled


class Replay:
    """One request's record on the server, beside the model's."""

    def __init__(self, client: "redis.Redis", pipeline: Pipeline, record: Record, request_id: str) -> None:
        self.client, self.pipeline, self.record, self.id = client, pipeline, record, request_id
        self.keys = pipeline.record_key(request_id), pipeline.log_key(request_id)
        self.epochs = {0: 0}
        """The server's epochs by the model's."""
        self.claims: dict[int, Claim] = {}
        self.sessions = dict.fromkeys(range(4), "")
        """Of the model's workers; and those whose workers have another one, or died."""
        self.ghosts: set[str] = set()
        self.saved: dict[Stage, float] = {}
        self.num_sessions = 0
        for stage in STAGES:
            self.client.delete(pipeline.free_key(stage))  # what is left of another request
        for index in range(4):
            self._open(index)

    def take(self, call: tuple[Any, ...], reply: Reply | int | None, before: Rec, after: Rec) -> None:
        """Call the script that a step calls, or do what it stands for, and compare."""
        if not call:
            return
        kind: str = call[0]
        args: Any = call[1:]
        match kind:
            case "handed":
                assert self.record.note_handed_off(self.claims[args[0]]) == reply
            case "renew":
                stage, session = _stage_of(args[0]), self.sessions[args[0]]
                # The server forgot the last renewal, if it knows the session at all.
                known_ms = int(self.client.zscore(self.pipeline.sessions_key(stage), session) or 0) + 1
                assert self.record.renew_session(stage, session, known_ms) is None
                self._open(args[0])
            case "crash":
                self.ghosts.add(self.sessions[args[0]])
                self._open(args[0])
            case "reap":
                self._reap(args[0])
            case "cancel":
                assert self.record.cancel_request(self.id) == reply
            case "sync":
                self._sync()
            case "lose":
                self._lose()
            case "due":
                self._go_past_all_times()
            case _:
                self._work(kind, args, reply, before, after)
        self.compare(after)

    def _work(self, kind: str, args: Any, reply: Any, before: Rec, after: Rec) -> None:
        match kind:
            case "put down":
                self._put_down(args, after)
            case "claim":
                self._claim(args, reply)
            case "take":
                self._take(args, reply, before)
            case "append":
                self._append(args, reply, before)
            case "finish":
                self._finish(args, reply)
            case "release":
                epoch, failed, waits, delivered = args
                wait_s = LEASE_S if waits else 0.0
                claim = self.claims[epoch]
                assert self.record.release_claim(claim, failed=failed, delivered=delivered, wait_s=wait_s) == reply

    def _claim(self, args: Any, reply: Any) -> None:
        stage, index, message, lives = args
        session = self._session(index, lives)
        if stage == "prefill":
            outcome = self.record.claim_prefill(self.id, session, str(message.body), _pack(message))
            self._claimed(outcome, reply)
        else:
            self._claimed(self.record.claim_decode(self.id, session, str(message.job), _pack(message)), reply)

    def _put_down(self, args: Any, after: Rec) -> None:
        stage, message = args
        body, job = ("", str(message.job)) if message.job else (str(message.body), "")
        self.record.put_down(stage, [UnclaimedMessage(self.id, body, job, _pack(message))])
        if after.epoch not in self.epochs:
            epoch = int(self.client.hget(self.keys[0], "epoch") or 0)
            assert epoch > max(self.epochs.values())
            self.epochs[after.epoch] = epoch

    def _claimed(self, outcome: object, reply: Any) -> None:
        match outcome:
            case Busy():
                assert reply == ("busy",)
                assert 0 < outcome.wait_s <= LEASE_S
            case Bound():
                assert reply == ("bound",)
            case Conflict():
                assert reply == ("conflict",)
            case Claim():
                kind, epoch, tokens, ended, cancelled, attempts = reply
                known = self.epochs.get(epoch)
                assert kind == "claim"
                assert outcome.epoch > max(self.epochs.values()) if known is None else outcome.epoch == known
                found = outcome.num_tokens, outcome.is_ended, outcome.is_cancelled, outcome.attempts
                assert found == (tokens, ended, cancelled, attempts)
                self.epochs[epoch] = outcome.epoch
                self.claims[epoch] = outcome

    def _take(self, args: Any, reply: Any, before: Rec) -> None:
        stage, index, lives = args
        taken = self.record.take_over_free(stage, self._session(index, lives), 1)
        assert bool(taken) == (reply[0] == "claim")
        for one in taken:
            assert one.message == _pack(before.message)
            self._claimed(one.claim, reply)

    def _append(self, args: Any, reply: Any, before: Rec) -> None:
        epoch, position = args
        claim = self.claims[epoch]
        rolled = roll_hash(hash_of(before.tokens[:position]), token := token_of(epoch, position))
        event = TokenEvent.at_position(position, rolled, token, f"<{token}>")
        assert self.record.append_tokens([(claim, event)]) == [reply]

    def _finish(self, args: Any, reply: Any) -> None:
        epoch, end = args
        claim = self.claims[epoch]
        claim.num_tokens = end.tokens
        assert self.record.finish_request(claim, EndEvent(finish_reason="error", text=end.error)) == reply

    def _open(self, index: int) -> None:
        """A session for the worker, in the stage that it is of."""
        self.num_sessions += 1
        self.sessions[index] = f"{self.id}-w{index}/{self.num_sessions}"
        assert self.record.renew_session(_stage_of(index), self.sessions[index]) is not None

    def _session(self, index: int, lives: bool) -> str:
        """The worker's; one with nothing to lose has opened another by now, where the server lost it."""
        sessions = self.pipeline.sessions_key(_stage_of(index))
        if lives and self.client.zscore(sessions, self.sessions[index]) is None:
            self._open(index)
        return self.sessions[index]

    def _reap(self, index: int) -> None:
        """The server's clock goes on: the session, or those of all that died, were not renewed."""
        over = self.ghosts if index == GHOST else {self.sessions[index]}
        for session in over:
            stage = _stage_of(_index_of(session))
            if self.client.zadd(self.pipeline.sessions_key(stage), {session: 1}, xx=True, ch=True):
                self.record.end_expired_sessions(stage, 2)
            assert not self.client.exists(self.pipeline.held_key(session))
        self.ghosts -= over

    def _go_past_all_times(self) -> None:
        if self.client.hexists(self.keys[0], "not_before"):
            self.client.hset(self.keys[0], "not_before", 1)
        for stage in STAGES:
            self.client.zadd(self.pipeline.free_key(stage), {self.id: 1}, xx=True)

    def _sync(self) -> None:
        for key in self.keys:
            self.client.delete(key + ":saved")
            self.client.copy(key, key + ":saved")
        scores = {stage: self.client.zscore(self.pipeline.free_key(stage), self.id) for stage in STAGES}
        self.saved = {stage: score for stage, score in scores.items() if score is not None}

    def _lose(self) -> None:
        """The server forgets what came after it was last written down, and goes on when its clock is past that. All
        workers find that their sessions are lost; what one of them held is a ghost's.
        """
        for key in self.keys:
            if not self.client.copy(key + ":saved", key, replace=True):
                self.client.delete(key)
        for stage in STAGES:
            self.client.zrem(self.pipeline.free_key(stage), self.id)
            if stage in self.saved:
                self.client.zadd(self.pipeline.free_key(stage), {self.id: self.saved[stage]})
        for session in (*self.sessions.values(), *self.ghosts):
            self.client.zrem(self.pipeline.sessions_key(_stage_of(_index_of(session))), session)
            self.client.delete(self.pipeline.held_key(session))
        holder = str(self.client.hget(self.keys[0], "session") or b"", "utf-8")  # type: ignore[arg-type]
        if holder:
            stage = _stage_of(_index_of(holder))
            self.client.zadd(self.pipeline.sessions_key(stage), {holder: _now_ms(self.client.time()) + 1000 * LEASE_S})
            self.client.sadd(self.pipeline.held_key(holder), self.id)
            self.ghosts.add(holder)
        while _now_ms(self.client.time()) <= max(self.epochs.values()):
            pass

    def _compare_session(self, rec: Rec, session: str) -> None:
        """The record names it, it lives, and the request is in the set of what it holds, and of no other's."""
        known = {*self.sessions.values(), *self.ghosts}
        if rec.session == NOBODY:
            assert session == ""
        elif rec.session == GHOST:
            assert session in self.ghosts
        else:
            assert session == self.sessions[rec.session]
        for one in known:
            assert bool(self.client.sismember(self.pipeline.held_key(one), self.id)) == (one == session)

    def compare(self, rec: Rec) -> None:
        """The record and the log are the model's."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hmget(self.keys[0], _FIELDS)
            pipe.xrange(self.keys[1])
            pipe.time()
            values, entries, time = pipe.execute()
        text = {name: (value or b"").decode() for name, value in zip(_FIELDS, values, strict=True)}
        now = _now_ms(time)
        assert int(text["epoch"] or 0) == self.epochs[rec.epoch]
        self._compare_session(rec, text["session"])
        assert (int(text["not_before"] or 0) > now) == rec.waits
        for stage in STAGES:
            score, place = self.client.zscore(self.pipeline.free_key(stage), self.id), PLACES[stage]
            assert (NEVER if score is None else LATER if score > now else DUE) == rec.free[place]
        assert (text["stage"] or "new") == rec.stage
        assert int(text["bound"] or 0) == rec.bound
        assert int(text["body"] or 0) == rec.body
        assert int(text["attempts"] or 0) == rec.attempts
        assert (text["cancelled"] == "1") == rec.cancelled
        assert text["message"].encode() == _pack(rec.message)
        assert int(text["tokens"] or 0) == len(rec.tokens)
        assert (text["hash"] or START_HASH) == hash_of(rec.tokens)
        assert [(name.decode(), json.loads(fields[b"e"])) for name, fields in entries] == _log_of(rec)


def _index_of(session: str) -> int:
    return int(session.partition("-w")[2].partition("/")[0])


def _stage_of(index: int) -> Stage:
    return "prefill" if index < 2 else "decode"


def _log_of(rec: Rec) -> list[tuple[str, Any]]:
    """The log's entries as they have to be."""
    entries: list[tuple[str, TokenEvent | EndEvent]] = []
    for position, epoch in enumerate(rec.tokens):
        token, rolled = token_of(epoch, position), hash_of(rec.tokens[: position + 1])
        event = TokenEvent(id=event_id(position, rolled), token=token, text=f"<{token}>")
        entries.append((f"{position}-1", event))
    if rec.end is not None:
        usage = Usage(completion_tokens=rec.end.tokens)
        entries.append((f"{rec.end.tokens}-2", EndEvent(finish_reason="error", text=rec.end.error, usage=usage)))
    return [(name, json.loads(event.encode())) for name, event in entries]


def _pack(message: Message | None) -> bytes:
    return b"" if message is None else json.dumps(message).encode()


def _now_ms(time: tuple[int, int]) -> int:
    seconds, micros = time
    return int(seconds) * 1000 + int(micros) // 1000
