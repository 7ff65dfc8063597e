"""The model's steps, taken by the real scripts on a real server: replies and records have to agree after each."""

import json
from typing import Any

import redis

from penstock.messages import EndEvent, TokenEvent, Usage
from penstock.names import START_HASH, Pipeline, Stage, event_id, roll
from penstock.record import Bound, Busy, Claim, Conflict, Record, Waiting
from tests.protocol.script import NOBODY, NONE, OUT, RUNS, Message, Rec, Reply

LEASE_S = 600.0
"""Longer than any test: a lease runs out when the model says so."""
_FIELDS = ["epoch", "owner", "lease", "stage", "bound", "body", "attempts", "cancelled", "message", "tokens", "hash"]


def token_of(epoch: int, position: int) -> int:
    """The token that the holder of an epoch draws for a position: no other draws it."""
    return epoch * 16 + position


def hash_of(tokens: tuple[int, ...]) -> str:
    """The rolling hash after a log."""
    rolled = START_HASH
    for position, epoch in enumerate(tokens):
        rolled = roll(rolled, token_of(epoch, position))
    return rolled


class Replay:
    """One request's record on the server, beside the model's."""

    def __init__(self, client: "redis.Redis", pipeline: Pipeline, record: Record, request_id: str) -> None:
        self.client, self.pipeline, self.record, self.id = client, pipeline, record, request_id
        self.keys = pipeline.record_key(request_id), pipeline.log_key(request_id)
        self.epochs = {0: 0}
        """The server's epochs by the model's."""
        self.claims: dict[int, Claim] = {}

    def take(self, call: tuple[Any, ...], reply: Reply | int | None, before: Rec, after: Rec) -> None:
        """Call the script that a step calls, or do what it stands for, and compare."""
        if not call:
            return
        kind: str = call[0]
        args: Any = call[1:]
        match kind:
            case "handed":
                assert self.record.handed(self.claims[args[0]]) == reply
            case "renew":
                assert self.record.renew([self.claims[args[0]]]) == [reply]
            case "cancel":
                assert self.record.cancel(self.id) == reply
            case "sync":
                self._sync()
            case "lose":
                self._lose(after)
            case "lease over":
                self._let_lease_run_out(before)
            case "claim":
                self._claim(args, reply)
            case "put down":
                self._put_down(args, after)
            case _:
                self._work(kind, args, reply, before)
        self.compare(after)

    def _work(self, kind: str, args: Any, reply: Any, before: Rec) -> None:
        match kind:
            case "take over":
                self._take_over(args, reply, before)
            case "append":
                self._append(args, reply, before)
            case "finish":
                self._finish(args, reply)
            case "release":
                self._release(args, reply)

    def _claim(self, args: Any, reply: Any) -> None:
        stage, owner, message = args
        if stage == "prefill":
            outcome = self.record.claim_prefill(self.id, f"w{owner}", str(message.body), _pack(message))
            self._claimed(outcome, reply)
        else:
            self._claimed(self.record.claim_decode(self.id, f"w{owner}", str(message.job), _pack(message)), reply)

    def _put_down(self, args: Any, after: Rec) -> None:
        stage, message = args
        body, job = ("", str(message.job)) if message.job else (str(message.body), "")
        self.record.put_down(stage, [Waiting(self.id, body, job, _pack(message))])
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
                found = outcome.num_tokens, outcome.ended, outcome.cancelled, outcome.attempts
                assert found == (tokens, ended, cancelled, attempts)
                self.epochs[epoch] = outcome.epoch
                self.claims[epoch] = outcome

    def _take_over(self, args: Any, reply: Any, before: Rec) -> None:
        stage, owner = args
        taken = self.record.take_over(self.id, stage, f"w{owner}")
        if taken is not None:
            assert taken.message == _pack(before.message)
            self._claimed(taken.claim, reply)
            return
        is_listed = self.client.zscore(self.pipeline.held_key(stage), self.id) is not None
        assert reply == (("busy",) if is_listed else ("gone",))

    def _append(self, args: Any, reply: Any, before: Rec) -> None:
        epoch, position = args
        claim = self.claims[epoch]
        rolled = roll(hash_of(before.tokens[:position]), token := token_of(epoch, position))
        event = TokenEvent.at(position, rolled, token, f"<{token}>")
        assert self.record.append([(claim, event)]) == [reply]

    def _finish(self, args: Any, reply: Any) -> None:
        epoch, end = args
        claim = self.claims[epoch]
        claim.num_tokens = end.tokens
        assert self.record.finish(claim, EndEvent(finish_reason="error", text=end.error)) == reply

    def _release(self, args: Any, reply: Any) -> None:
        epoch, failed, waits = args
        claim = self.claims[epoch]
        wait_s = LEASE_S if waits else 0.0
        assert self.record.release(claim, failed=failed, delivered=False, wait_s=wait_s) == reply
        if reply and not waits:
            self._assert_overdue(claim.stage)

    def _let_lease_run_out(self, before: Rec) -> None:
        """The server's clock goes on: who holds the request is in the list, and found there."""
        held = self._held(before)
        assert self.client.zscore(held, self.id) is not None
        self.client.hset(self.keys[0], "lease", 2)
        self.client.zadd(held, {self.id: 2})
        self._assert_overdue("prefill" if before.stage == "prefill" else "decode")

    def _held(self, rec: Rec) -> str:
        return self.pipeline.held_key("prefill" if rec.stage == "prefill" else "decode")

    def _assert_overdue(self, stage: Stage) -> None:
        assert self.id in self.record.overdue(stage, 1000)
        assert self.id not in self.record.overdue(stage, 1000)  # others are not told for a while

    def _sync(self) -> None:
        for key in self.keys:
            self.client.delete(key + ":saved")
            self.client.copy(key, key + ":saved")

    def _lose(self, after: Rec) -> None:
        """The server forgets what came after it was last written down, and goes on when its clock is past that."""
        for key in self.keys:
            if not self.client.copy(key + ":saved", key, replace=True):
                self.client.delete(key)
        while _now_ms(self.client.time()) <= max(self.epochs.values()):
            pass
        if after.lease != NONE:
            self.client.zadd(self._held(after), {self.id: _now_ms(self.client.time())})

    def compare(self, rec: Rec) -> None:
        """The record and the log are the model's."""
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hmget(self.keys[0], _FIELDS)
            pipe.xrange(self.keys[1])
            pipe.time()
            values, entries, time = pipe.execute()
        text = {name: (value or b"").decode() for name, value in zip(_FIELDS, values, strict=True)}
        lease = int(text["lease"] or 0)
        assert int(text["epoch"] or 0) == self.epochs[rec.epoch]
        assert text["owner"] == ("" if rec.owner == NOBODY else f"w{rec.owner}")
        assert (NONE if not lease else RUNS if lease > _now_ms(time) else OUT) == rec.lease
        assert (text["stage"] or "new") == rec.stage
        assert int(text["bound"] or 0) == rec.bound
        assert int(text["body"] or 0) == rec.body
        assert int(text["attempts"] or 0) == rec.attempts
        assert (text["cancelled"] == "1") == rec.cancelled
        assert text["message"].encode() == _pack(rec.message)
        assert int(text["tokens"] or 0) == len(rec.tokens)
        assert (text["hash"] or START_HASH) == hash_of(rec.tokens)
        assert [(name.decode(), json.loads(fields[b"e"])) for name, fields in entries] == _log_of(rec)


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
