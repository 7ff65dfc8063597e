"""The records of requests that are spread over several servers, for a worker: `Record` and `Session`, once a server.

One that is away is an outage of its own requests. What a server does that does not answer:

    1  whoever finds it out, the loop or the thread of the session, notes that the server is away. It is asked for
       nothing any more: claims are postponed, and everything else is as if the claims were lost
    2  the worker hears that its claims there are lost, lets go of them, and keeps their deliveries
    3  the session's thread goes on asking. When the server answers, the thread opens a new session and ends the one
       before, with all that it held. From then on requests are claimed again

What a crash costs: at any of them what the death of a worker costs, on that server alone.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import redis

from penstock.config.settings import RecordSettings
from penstock.messages import EndEvent, TokenEvent
from penstock.names import Pipeline, Stage
from penstock.record.claim import AppendOutcome, Bound, Busy, Claim, ClaimEvent, Conflict, TakenOver
from penstock.record.log import RequestStatus
from penstock.record.record import Record, UnclaimedMessage
from penstock.record.session import Session
from penstock.redis.client import is_outage, redis_client
from penstock.redis.servers import ByServer, choose_server, store_server_list
from penstock.redis.urls import split_urls

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

SERVER_TIMEOUT_S = 0.5
"""One of several servers that does not answer within this time counts as away: the loop waits for it, and with it the
requests of the others. What was computed stays in the pool, so it costs little where the server was only slow."""
AWAY_RETRY_S = 1.0
"""A request of a server that is away is looked at again so much later."""
ID_SEPARATOR = "\n"
"""Between the ids of a worker's sessions, one for each server."""


class _Server:
    """One of several servers, as a worker knows it. Its appends are the loop's, all else any thread's."""

    def __init__(self, name: str, record: Record, keep: Callable[[], None]) -> None:
        """`keep` has the server keep the list of all servers, see `penstock.redis.servers.keep_list`."""
        self.name, self.record, self.store_list = name, record, keep
        self.is_away = False
        self.reason = ""
        self._num_sent = 0

    def call_or_default(self, call: Callable[[], T], otherwise: T) -> T:
        """What the server says; `otherwise` where it is away, or is found to be. Raises what is no outage."""
        if self.is_away:
            return otherwise
        try:
            return call()
        except redis.RedisError as error:
            self.mark_away(error)
            return otherwise

    def mark_away(self, error: redis.RedisError) -> None:
        """Note that the server is away. Raises the error if it is no outage."""
        if not is_outage(error):
            raise error
        if not self.is_away:
            log.warning("Redis %s is away, and its requests wait: %s", self.name, error)
        self.is_away, self.reason = True, str(error)

    def mark_back(self) -> None:
        """Note that it answers."""
        if self.is_away:
            log.info("Redis %s answers again", self.name)
        self.is_away, self.reason = False, ""

    def send_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        """Send tokens to their logs."""
        self._num_sent += len(entries)
        self.call_or_default(partial(self.record.send_tokens, entries), None)

    def collect_outcomes(self) -> list[AppendOutcome]:
        """The outcomes of what was sent since the last call. They are all `FENCED` if the server was away meanwhile: of
        some it may be unknown whether they were written, and whoever claims the requests next finds that out.
        """
        if not self._num_sent:
            return []
        num_sent, self._num_sent = self._num_sent, 0
        outcomes: list[AppendOutcome] = self.call_or_default(self._collect_soon, [])
        if len(outcomes) == num_sent:
            return outcomes
        self.record.forget_sent_tokens()
        return [AppendOutcome.FENCED] * num_sent

    def _collect_soon(self) -> list[AppendOutcome]:
        if not self.record.wait_for_outcome(SERVER_TIMEOUT_S):
            raise redis.TimeoutError("no answer to tokens that were sent")
        return self.record.collect_outcomes()


class _SpreadRecord(Record):
    """`Record` over several servers. Where one is away its methods give what they give when a claim is lost, or `Busy`.

    `session` is the id of a `Sessions` in all of them.
    """

    def __init__(self, clients: ByServer["redis.Redis"], pipeline: Pipeline, settings: RecordSettings) -> None:
        super().__init__(clients.parts[0], pipeline, settings)

        def server(name: str, client: "redis.Redis") -> _Server:
            record = Record(client, pipeline, settings)
            return _Server(name, record, partial(store_server_list, client, pipeline, clients.names))

        self.servers = ByServer(clients.names, list(map(server, clients.names, clients.parts)))
        self._sent_to: list[_Server] = []
        self._turn = 0

    @property
    def current_problem(self) -> str:
        return "; ".join(f"Redis {one.name} is away: {one.reason}" for one in self.servers.parts if one.is_away)

    # Requests.

    def claim_all(
        self, stage: Stage, session: str, waiting: Sequence[UnclaimedMessage]
    ) -> list[Claim | Busy | Bound | Conflict]:
        sessions = dict(zip(self.servers.names, session.split(ID_SEPARATOR), strict=True))

        def claim(server: _Server, mine: list[UnclaimedMessage]) -> list[Claim | Busy | Bound | Conflict]:
            busy: list[Claim | Busy | Bound | Conflict] = [Busy(AWAY_RETRY_S) for _ in mine]
            if not sessions[server.name]:  # it was away when the caller asked for the sessions, and is back since
                return busy
            return server.call_or_default(partial(server.record.claim_all, stage, sessions[server.name], mine), busy)

        return self._ask_servers(waiting, lambda one: one.id, claim)

    def put_down(self, stage: Stage, waiting: Sequence[UnclaimedMessage]) -> list[UnclaimedMessage]:
        left: list[UnclaimedMessage] = []
        for server, mine in self._group_by_server(waiting, lambda one: one.id):
            left += server.call_or_default(partial(server.record.put_down, stage, mine), mine)
        return left

    def take_over_free(self, stage: Stage, session: str, max_requests: int) -> list[TakenOver]:
        """As `Record.take_over_free`. Each call begins with another server."""
        taken: list[TakenOver] = []
        servers = list(zip(self.servers.parts, session.split(ID_SEPARATOR), strict=True))
        self._turn = (self._turn + 1) % len(servers)
        for server, own in servers[self._turn :] + servers[: self._turn]:
            if len(taken) < max_requests:
                taken += server.call_or_default(
                    partial(server.record.take_over_free, stage, own, max_requests - len(taken)), []
                )
        return taken

    def send_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        for server, mine in self._group_by_server(entries, lambda entry: entry[0].id):
            server.send_tokens(mine)
        self._sent_to += [self.servers[claim.id] for claim, _ in entries]

    def collect_outcomes(self) -> list[AppendOutcome]:
        """As `Record.collect_outcomes`, but never raises for an outage."""
        sent_to, self._sent_to = self._sent_to, []
        outcomes = {server.name: iter(server.collect_outcomes()) for server in self.servers.parts}
        return [next(outcomes[server.name]) for server in sent_to]

    def finish_all(self, ends: Sequence[tuple[Claim, EndEvent]]) -> list[bool]:
        return self._note_on_servers(ends, lambda end: end[0].id, Record.finish_all)

    def note_all_handed_off(self, claims: Sequence[Claim]) -> list[bool]:
        return self._note_on_servers(claims, lambda claim: claim.id, Record.note_all_handed_off)

    def release_all(self, claims: Sequence[tuple[Claim, bool]]) -> list[bool]:
        return self._note_on_servers(claims, lambda one: one[0].id, Record.release_all)

    def release_claim(self, claim: Claim, *, failed: bool = False, delivered: bool = True, wait_s: float = 0.0) -> bool:
        server = self.servers[claim.id]
        give_back = partial(server.record.release_claim, claim, failed=failed, delivered=delivered, wait_s=wait_s)
        return server.call_or_default(give_back, False)

    def count_free(self, stage: Stage) -> int:
        return sum(server.call_or_default(partial(server.record.count_free, stage), 0) for server in self.servers.parts)

    # Reading: raises where the request's server is away.

    def cancel_request(self, request_id: str) -> bool:
        return self.servers[request_id].record.cancel_request(request_id)

    def read_log(self, request_id: str, after_position: int = -1) -> list[TokenEvent | EndEvent]:
        return self.servers[request_id].record.read_log(request_id, after_position)

    def read_status(self, request_id: str) -> RequestStatus | None:
        return self.servers[request_id].record.read_status(request_id)

    def close(self) -> None:
        for server in self.servers.parts:
            server.record.close()

    def _group_by_server(self, items: Sequence[T], id_of: Callable[[T], str]) -> Iterator[tuple[_Server, list[T]]]:
        """The servers that have to do with any of the items, each with its own."""
        dealt: dict[int, list[T]] = {}
        for item in items:
            dealt.setdefault(choose_server(self.servers.names, id_of(item)), []).append(item)
        for index, mine in dealt.items():
            yield self.servers.parts[index], mine

    def _note_on_servers(
        self, items: Sequence[T], id_of: Callable[[T], str], note: Callable[[Record, Sequence[T]], list[bool]]
    ) -> list[bool]:
        """Whether the servers noted the items, in their order; one that is away has not."""
        return self._ask_servers(
            items,
            id_of,
            lambda server, mine: server.call_or_default(partial(note, server.record, mine), [False] * len(mine)),
        )

    def _ask_servers(
        self, items: Sequence[T], id_of: Callable[[T], str], ask: Callable[[_Server, list[T]], list[R]]
    ) -> list[R]:
        """What the servers say of the items, in their order."""
        answers = {server.name: iter(ask(server, mine)) for server, mine in self._group_by_server(items, id_of)}
        return [next(answers[self.servers[id_of(item)].name]) for item in items]


class _ServerSession(Session):
    """A session on one of several servers."""

    def __init__(
        self, server: _Server, stage: Stage, name: str, parts: Callable[[], list[str]] = list, *, adopts: bool = False
    ) -> None:
        self._server = server
        super().__init__(server.record, stage, name, parts, adopts=adopts)

    def collect_events(self) -> list[tuple[Claim, ClaimEvent]]:
        if self._server.is_away:
            with self._lock:
                self._lost += self._claims
                self._claims = set()
        return super().collect_events()

    def disown_partitions(self) -> None:
        if not self._server.is_away:
            super().disown_partitions()

    def close(self) -> None:
        self.stop()
        if not self._server.is_away:
            super().close()

    def _open_session(self) -> None:
        try:
            self._server.store_list()
            super()._open_session()
        except redis.RedisError as error:
            self._server.mark_away(error)

    def _renew_session(self) -> None:
        try:
            if self._server.is_away:
                self._begin_anew()
            else:
                super()._renew_session()
        except redis.RedisError as error:
            self._server.mark_away(error)

    def _begin_anew(self) -> None:
        before = self.id
        self._server.store_list()
        super()._open_session()
        if before:
            self._record.end_expired_sessions(self._stage, 0, before)
        self._server.mark_back()


class Sessions:
    """A worker's sessions, one on each server of its record. As `Session`; claims are told by their request's."""

    def __init__(
        self,
        record: Record,
        stage: Stage,
        name: str,
        parts: Callable[[], list[str]] = list,
        *,
        adopts: bool = False,
    ) -> None:
        """As `Session`. What topics are made of is read, and adopted, by the one on the first server."""
        if not isinstance(record, _SpreadRecord):
            self._sessions = ByServer[Session]([""], [Session(record, stage, name, parts, adopts=adopts)])
            return
        first, *others = record.servers.parts
        made: list[Session] = [_ServerSession(first, stage, name, parts, adopts=adopts)]
        made += [_ServerSession(server, stage, name) for server in others]
        self._sessions = ByServer(record.servers.names, made)

    @property
    def id(self) -> str:
        """Of each server's session, in the order of the servers."""
        return ID_SEPARATOR.join(session.id for session in self._sessions.parts)

    @property
    def num_free(self) -> int:
        """How many requests of the stage any worker may take."""
        return sum(session.num_free for session in self._sessions.parts)

    @num_free.setter
    def num_free(self, num_free: int) -> None:
        num_taken = self.num_free - num_free
        for session in self._sessions.parts:
            here = min(num_taken, session.num_free)
            session.num_free -= here
            num_taken -= here

    @property
    def adopted_partitions(self) -> list[str]:
        """Parts of topics that nobody reads as a member, and this worker has to."""
        return self._sessions.parts[0].adopted_partitions

    def add_claim(self, claim: Claim) -> None:
        """Watch a claim: `collect_events` returns what happens to it."""
        self._sessions[claim.id].add_claim(claim)

    def remove_claim(self, claim: Claim) -> None:
        """Forget a claim: it ended, was handed off, released or lost."""
        self._sessions[claim.id].remove_claim(claim)

    def collect_events(self) -> list[tuple[Claim, ClaimEvent]]:
        """As `Session.collect_events`, of all servers; claims of one that is away are lost."""
        return [one for session in self._sessions.parts for one in session.collect_events()]

    def stop(self) -> None:
        """Renew no more: the sessions run out."""
        for session in self._sessions.parts:
            session.stop()

    def disown_partitions(self) -> None:
        """Read nothing any more. Raises `redis.RedisError`."""
        self._sessions.parts[0].disown_partitions()

    def close(self) -> None:
        """End the sessions: what they still hold is free at once."""
        for session in self._sessions.parts:
            session.close()


def connect_servers(text: str) -> ByServer["redis.Redis"]:
    """A worker's clients of all servers of an address list."""
    answer_s = {"answer_s": SERVER_TIMEOUT_S} if len(split_urls(text)) > 1 else {}
    return ByServer.from_urls(text, lambda url: redis_client(url, **answer_s))


def open_record(clients: ByServer["redis.Redis"], pipeline: Pipeline, settings: RecordSettings) -> Record:
    """The records of a pipeline on its servers."""
    if len(clients.parts) == 1:
        return Record(clients.parts[0], pipeline, settings)
    return _SpreadRecord(clients, pipeline, settings)
