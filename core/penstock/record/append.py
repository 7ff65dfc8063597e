"""Appends tokens to their logs: sends them in batches, and collects their outcomes later."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import redis
from redis.exceptions import NoScriptError

from penstock.messages import TokenEvent
from penstock.record.claim import AppendOutcome, Claim
from penstock.redis.client import raise_outage
from penstock.redis.scripts import load_script
from penstock.sealing import SEALED_HASH, seal_event

log = logging.getLogger(__name__)

APPEND = load_script("penstock.record", "append")
NUM_HEAD_WORDS = 9
"""Number of words of an append that are the same for all appends of a claim."""
_GONE = (redis.ConnectionError, redis.TimeoutError, NoScriptError)


@dataclass(slots=True)
class _Sent:
    claim: Claim
    num_tokens: int
    position: int
    """The position of the first token."""
    hash_before: str
    packed: bytes


class TokenAppender:
    """Runs `append.lua` for batches of tokens, over a connection of its own. Belongs to one thread."""

    def __init__(self, client: "redis.Redis") -> None:
        self._pool = client.connection_pool
        self._connection: Any = None
        self._in_flight: list[_Sent] = []
        self._outcomes: list[AppendOutcome] = []
        self._broken = False

    def send_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        """Send a batch and return. If the connection fails, `collect_outcomes` opens it again."""
        batch = []
        for claim, tokens in groupby(entries, lambda entry: entry[0]):  # a step may give a request several tokens
            events = [event for _, event in tokens]
            position, rolled = int(events[0].id.partition("-")[0]), events[-1].id.partition("-")[2]
            entries_of, hash_after = [event.encode() for event in events], rolled.encode()
            if (sealer := claim.sealer) is not None:
                entries_of = [seal_event(sealer, position + n, entry) for n, entry in enumerate(entries_of)]
                hash_after = SEALED_HASH
            values = b"%d" % position, hash_after, *entries_of
            words = b"*%d\r\n" % (NUM_HEAD_WORDS + len(values)), claim.append_head, _encode_bulk_strings(*values)
            batch.append(_Sent(claim, len(events), position, claim.rolling_hash, b"".join(words)))
            claim.num_tokens, claim.rolling_hash = position + len(events), rolled
        self._in_flight += batch
        if batch and not self._broken:
            try:
                self._write_commands(batch)
            except _GONE:
                self._broken = True

    def collect_outcomes(self, *, waits: bool = True) -> list[AppendOutcome]:
        """Return the outcomes of all tokens sent since the last call, in that order; unless it `waits`, only those that
        have come. Open a broken connection once.
        """
        try:
            self._read_replies(waits=waits)
        except _GONE:
            self._read_replies(waits=waits)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait_for_outcome(self, timeout_s: float) -> bool:
        """Return whether `collect_outcomes` finds a reply within a time, or a connection to open again."""
        try:
            return self._broken or not self._in_flight or self._can_read(timeout_s)
        except _GONE:
            return True

    def forget_sent(self) -> None:
        """Give up the tokens that were sent, and their outcomes."""
        self.close()
        self._in_flight, self._outcomes, self._broken = [], [], False

    def close(self) -> None:
        """Free the connection. The next batch opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)

    def _read_replies(self, *, waits: bool) -> None:
        if self._broken:
            self.close()
            self._write_commands(self._in_flight)
        self._broken = True  # until every reply is read
        num_read = 0
        try:
            for sent in self._in_flight:
                if not waits and not self._can_read(0.0):
                    break
                self._note_outcome(sent, self._read_outcome(sent.claim))
                num_read += 1
        finally:
            del self._in_flight[:num_read]
        self._broken = False

    def _note_outcome(self, sent: _Sent, outcome: AppendOutcome) -> None:
        self._outcomes += [outcome] * sent.num_tokens
        if outcome in (AppendOutcome.CANCELLED, AppendOutcome.REFUSED) and sent.position < sent.claim.num_tokens:
            sent.claim.num_tokens, sent.claim.rolling_hash = sent.position, sent.hash_before

    def _write_commands(self, batch: Sequence[_Sent]) -> None:
        connection = self._connection or self._open_connection()
        connection.send_packed_command([b"".join(sent.packed for sent in batch)], check_health=False)

    def _read_outcome(self, claim: Claim) -> AppendOutcome:
        try:
            return AppendOutcome(self._read_reply())
        except redis.ResponseError as error:
            (refusal,) = raise_outage([error])
            log.error("request %s: Redis refused to append its tokens: %s", claim.id, refusal)
            return AppendOutcome.REFUSED

    def _read_reply(self) -> Any:
        if self._connection is None:
            raise redis.ConnectionError("the connection was closed with replies outstanding")
        return self._connection.read_response()

    def _can_read(self, timeout_s: float) -> bool:
        """Return whether there is something to read within a time: a reply, or the connection's end."""
        return self._connection is None or bool(self._connection.can_read(timeout_s))

    def _open_connection(self) -> Any:
        connection: Any = self._pool.get_connection()
        try:
            connection.send_command("SCRIPT", "LOAD", APPEND.text)
            connection.read_response()
        except BaseException:
            connection.disconnect()
            self._pool.release(connection)
            raise
        self._connection = connection
        return connection


def encode_append_head(keys: Sequence[str], channel: str, pending_ms: int, epoch: int, num_found: int) -> bytes:
    """Return the wire bytes of a claim's appends between the number of words and the position."""
    words = "EVALSHA", APPEND.sha, len(keys), *keys, channel, pending_ms, epoch, num_found
    assert len(words) == NUM_HEAD_WORDS
    return _encode_bulk_strings(*(str(word).encode() for word in words))


def _encode_bulk_strings(*values: bytes) -> bytes:
    """Return `values` as RESP bulk strings, one after the other."""
    return b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
