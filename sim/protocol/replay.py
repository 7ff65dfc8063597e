"""Takes the model's steps with a record, on a real server or in memory, and compares replies and states after each."""

import json
import math
from typing import Any

from penstock.messages import EndEvent, TokenEvent, Usage
from penstock.names import START_HASH, event_id, roll_hash
from penstock.record import Bound, Busy, Claim, Conflict, Record, UnclaimedMessage
from sim.protocol.keepers import LEASE_S, Keeper, RequestState
from sim.protocol.script import DUE, GHOST, NOBODY, Message, Reply, RequestRecord


def make_token(epoch: int, position: int) -> int:
    """Return the token that the holder of an epoch samples at a position. No other holder samples the same one."""
    return epoch * 16 + position


def hash_tokens(tokens: tuple[int, ...]) -> str:
    """Return the rolling hash after the tokens of a log."""
    rolled = START_HASH
    for position, epoch in enumerate(tokens):
        rolled = roll_hash(rolled, make_token(epoch, position))
    return rolled


class Replay:
    """One request's record, compared with the model's after each step."""

    def __init__(self, keeper: Keeper, record: Record, request_id: str) -> None:
        self.keeper, self.record, self.id = keeper, record, request_id
        self.epochs = {0: 0}
        """The record's epochs by the model's."""
        self.claims: dict[int, Claim] = {}
        self.sessions = dict.fromkeys(range(4), "")
        """The session of each worker of the model."""
        self.ghosts: set[str] = set()
        """Sessions whose workers have another one, or are dead."""
        self.num_sessions = 0
        self.keeper.clear_free()
        for index in range(4):
            self._open_session(index)

    def replay_step(
        self, call: tuple[Any, ...], reply: Reply | int | None, before: RequestRecord, after: RequestRecord
    ) -> None:
        """Call the script of a step, or do what the step stands for, and compare the records."""
        if not call:
            return
        kind: str = call[0]
        args: Any = call[1:]
        match kind:
            case "handed":
                assert self.record.note_all_handed_off([self.claims[args[0]]]) == [reply]
            case "renew":
                session = self.sessions[args[0]]
                # The last renewal was forgotten, if the session is known at all.
                known_ms = (self.keeper.find_session_end(session) or 0) + 1
                assert self.record.renew_session(session, known_ms) is None
                self._open_session(args[0])
            case "crash":
                self.ghosts.add(self.sessions[args[0]])
                self._open_session(args[0])
            case "reap":
                self._end_sessions(args[0])
            case "cancel":
                assert self.record.cancel_request(self.id) == reply
            case "sync":
                self.keeper.save()
            case "lose":
                self._restore_saved_state()
            case "due":
                self.keeper.pass_waiting_times()
            case _:
                self._call_script(kind, args, reply, before, after)
        self.check_record(after)

    def _call_script(self, kind: str, args: Any, reply: Any, before: RequestRecord, after: RequestRecord) -> None:
        match kind:
            case "park":
                self._park_message(args, after)
            case "claim":
                self._claim_request(args, reply)
            case "take":
                self._take_over_request(args, reply, before)
            case "append":
                self._append_tokens(args, reply, before)
            case "finish":
                self._finish_request(args, reply)
            case "release":
                epoch, failed, waits, delivered = args
                wait_s = LEASE_S if waits else 0.0
                claim = self.claims[epoch]
                assert self.record.release_claim(claim, failed=failed, delivered=delivered, wait_s=wait_s) == reply

    def _claim_request(self, args: Any, reply: Any) -> None:
        stage, index, message, lives = args
        (outcome,) = self.record.claim_all(stage, self._get_session(index, lives), [self._describe_message(message)])
        self._check_claim(outcome, reply)

    def _park_message(self, args: Any, after: RequestRecord) -> None:
        stage, message = args
        self.record.park_messages(stage, [self._describe_message(message)])
        if after.epoch not in self.epochs:
            epoch = self.keeper.read().epoch
            assert epoch > max(self.epochs.values())
            self.epochs[after.epoch] = epoch

    def _describe_message(self, message: Message) -> UnclaimedMessage:
        body, name = ("", str(message.job)) if message.job else (str(message.body), str(message.name))
        since_result_s = 0.0 if message.is_answered else math.inf
        return UnclaimedMessage(self.id, body, name, _pack_message(message), since_result_s)

    def _check_claim(self, outcome: object, reply: Any) -> None:
        match outcome:
            case Busy():
                assert reply == ("busy",)
                assert 0 < outcome.wait_s <= LEASE_S
                assert outcome.epoch == self.keeper.read().epoch
            case Bound():
                assert reply == ("bound",)
            case Conflict():
                assert reply == ("conflict",)
            case Claim():
                kind, epoch, tokens, ended, cancelled, *attempts = reply
                known = self.epochs.get(epoch)
                assert kind == "claim"
                assert outcome.epoch > max(self.epochs.values()) if known is None else outcome.epoch == known
                found = outcome.num_tokens, outcome.is_ended + outcome.is_unbound, outcome.is_cancelled
                assert found == (tokens, ended, cancelled)
                assert [outcome.attempts, outcome.most_tokens, outcome.num_returns] == attempts
                self.epochs[epoch] = outcome.epoch
                self.claims[epoch] = outcome

    def _take_over_request(self, args: Any, reply: Any, before: RequestRecord) -> None:
        stage, index, lives = args
        taken = self.record.take_over_free(stage, self._get_session(index, lives), 1)
        assert bool(taken) == (reply[0] == "claim")
        for one in taken:
            assert one.message == _pack_message(before.message)
            self._check_claim(one.claim, reply)

    def _append_tokens(self, args: Any, reply: Any, before: RequestRecord) -> None:
        epoch, first, count = args
        rolled, entries = hash_tokens(before.tokens[:first]), []
        for position in range(first, first + count):
            rolled = roll_hash(rolled, token := make_token(epoch, position))
            entries.append((self.claims[epoch], TokenEvent.at_position(position, rolled, token, f"<{token}>")))
        assert self.record.append_tokens(entries) == [reply] * count

    def _finish_request(self, args: Any, reply: Any) -> None:
        epoch, end, name = args
        claim = self.claims[epoch]
        claim.num_tokens = end.tokens
        event = EndEvent(finish_reason="error", text=end.error)
        assert self.record.finish_request(claim, event, str(name or "")) == reply

    def _open_session(self, index: int) -> None:
        """Open a session for a worker."""
        self.num_sessions += 1
        self.sessions[index] = f"{self.id}-w{index}/{self.num_sessions}"
        assert self.record.renew_session(self.sessions[index]) is not None

    def _get_session(self, index: int, lives: bool) -> str:
        """Return the worker's session. Where it was lost, open another one first."""
        if lives and self.keeper.find_session_end(self.sessions[index]) is None:
            self._open_session(index)
        return self.sessions[index]

    def _end_sessions(self, index: int) -> None:
        """Let the time of a worker's session, or of all dead workers' sessions, run out, and end them."""
        # A worker that leaves with a session from before a loss leaves that to the others, in the model.
        over = self.ghosts if index == GHOST else {self.sessions[index]} - self.ghosts
        for session in over:
            if self.keeper.expire_session(session):
                self.record.end_expired_sessions(2)
            assert not self.keeper.is_held(session)
        self.ghosts -= over

    def _restore_saved_state(self) -> None:
        """Go back to the saved state, and wait until the clock is past all epochs.

        All workers find their sessions lost. The session that holds the request in the saved record becomes a ghost.
        """
        holder = self.keeper.restore({*self.sessions.values(), *self.ghosts})
        self.ghosts |= {holder} - {""}
        while self.keeper.now_ms() <= max(self.epochs.values()):
            pass

    def _check_session(self, rec: RequestRecord, session: str) -> None:
        """Check that the record names the right session, and that only that session's set holds the request."""
        known = {*self.sessions.values(), *self.ghosts}
        if rec.session == NOBODY:
            assert session == ""
        elif rec.session == GHOST:
            assert session in self.ghosts
        else:
            assert session == self.sessions[rec.session]
        for one in known:
            assert self.keeper.is_held(one) == (one == session)

    def check_record(self, rec: RequestRecord) -> None:
        """Check that the record and the log equal the model's."""
        found = self.keeper.read()
        self._check_session(rec, found.session)
        assert found == RequestState(
            epoch=self.epochs[rec.epoch],
            session=found.session,
            waits=rec.not_before_ms > DUE,
            stage=rec.stage,
            bound=str(rec.bound or ""),
            body=str(rec.body or ""),
            attempts=rec.attempts,
            cancelled=rec.cancelled,
            message=_pack_message(rec.message),
            num_tokens=len(rec.tokens),
            rolling_hash=hash_tokens(rec.tokens),
            free=rec.free,
            log=_build_log_entries(rec),
        )


def _build_log_entries(rec: RequestRecord) -> list[tuple[str, Any]]:
    """Return the entries that the log must have."""
    entries: list[tuple[str, TokenEvent | EndEvent]] = []
    for position, epoch in enumerate(rec.tokens):
        token, rolled = make_token(epoch, position), hash_tokens(rec.tokens[: position + 1])
        event = TokenEvent(id=event_id(position, rolled), token=token, text=f"<{token}>")
        entries.append((f"{position}-1", event))
    if rec.end is not None:
        usage = Usage(completion_tokens=rec.end.tokens)
        entries.append((f"{rec.end.tokens}-2", EndEvent(finish_reason="error", text=rec.end.error, usage=usage)))
    return [(name, json.loads(event.encode())) for name, event in entries]


def _pack_message(message: Message | None) -> bytes:
    return b"" if message is None else json.dumps(message).encode()
