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
from penstock.record.claim import AppendOutcome, Bound, Busy, Claim, Conflict, News, TakenOver
from penstock.record.log import Status
from penstock.record.record import Record, Waiting
from penstock.record.session import Session
from penstock.redis.client import is_outage, redis_client
from penstock.redis.servers import ByServer, choose_server, store_server_list
from penstock.redis.urls import split_urls

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

ANSWER_S = 0.5
"""One of several servers that does not answer within this time counts as away: the loop waits for it, and with it the
requests of the others. What was computed stays in the pool, so it costs little where the server was only slow."""
AWAY_S = 1.0
"""A request of a server that is away is looked at again so much later."""
BETWEEN = "\n"
"""Between the ids of a worker's sessions, one for each server."""


class _Server:
    """One of several servers, as a worker knows it. Its appends are the loop's, all else any thread's."""

    def __init__(self, name: str, record: Record, keep: Callable[[], None]) -> None:
        """`keep` has the server keep the list of all servers, see `penstock.redis.servers.keep_list`."""
        self.name, self.record, self.keep = name, record, keep
        self.is_away = False
        self.reason = ""
        self._num_sent = 0

    def ask(self, call: Callable[[], T], otherwise: T) -> T:
        """What the server says; `otherwise` where it is away, or is found to be. Raises what is no outage."""
        if self.is_away:
            return otherwise
        try:
            return call()
        except redis.RedisError as error:
            self.leave(error)
            return otherwise

    def leave(self, error: redis.RedisError) -> None:
        """Note that the server is away. Raises the error if it is no outage."""
        if not is_outage(error):
            raise error
        if not self.is_away:
            log.warning("Redis %s is away, and its requests wait: %s", self.name, error)
        self.is_away, self.reason = True, str(error)

    def come_back(self) -> None:
        """Note that it answers."""
        if self.is_away:
            log.info("Redis %s answers again", self.name)
        self.is_away, self.reason = False, ""

    def send(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        """Send tokens on their way."""
        self._num_sent += len(entries)
        self.ask(partial(self.record.send_append, entries), None)

    def collect(self) -> list[AppendOutcome]:
        """The outcomes of what was sent since the last call. They are all `FENCED` if the server was away meanwhile: of
        some it may be unknown whether they were written, and whoever claims the requests next finds that out.
        """
        if not self._num_sent:
            return []
        num_sent, self._num_sent = self._num_sent, 0
        outcomes: list[AppendOutcome] = self.ask(self._collect_soon, [])
        if len(outcomes) == num_sent:
            return outcomes
        self.record.forget_appends()
        return [AppendOutcome.FENCED] * num_sent

    def _collect_soon(self) -> list[AppendOutcome]:
        if not self.record.wait_for_outcome(ANSWER_S):
            raise redis.TimeoutError("no answer to tokens that were sent")
        return self.record.collect()


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
    def trouble(self) -> str:
        return "; ".join(f"Redis {one.name} is away: {one.reason}" for one in self.servers.parts if one.is_away)

    # Requests.

    def claim_all(
        self, stage: Stage, session: str, waiting: Sequence[Waiting]
    ) -> list[Claim | Busy | Bound | Conflict]:
        sessions = dict(zip(self.servers.names, session.split(BETWEEN), strict=True))

        def claim(server: _Server, mine: list[Waiting]) -> list[Claim | Busy | Bound | Conflict]:
            busy: list[Claim | Busy | Bound | Conflict] = [Busy(AWAY_S) for _ in mine]
            if not sessions[server.name]:  # it was away when the caller asked for the sessions, and is back since
                return busy
            return server.ask(partial(server.record.claim_all, stage, sessions[server.name], mine), busy)

        return self._each(waiting, lambda one: one.id, claim)

    def put_down(self, stage: Stage, waiting: Sequence[Waiting]) -> list[Waiting]:
        left: list[Waiting] = []
        for server, mine in self._dealt(waiting, lambda one: one.id):
            left += server.ask(partial(server.record.put_down, stage, mine), mine)
        return left

    def take(self, stage: Stage, session: str, most: int) -> list[TakenOver]:
        """As `Record.take`. Each call begins with another server."""
        taken: list[TakenOver] = []
        servers = list(zip(self.servers.parts, session.split(BETWEEN), strict=True))
        self._turn = (self._turn + 1) % len(servers)
        for server, own in servers[self._turn :] + servers[: self._turn]:
            if len(taken) < most:
                taken += server.ask(partial(server.record.take, stage, own, most - len(taken)), [])
        return taken

    def send_append(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        for server, mine in self._dealt(entries, lambda entry: entry[0].id):
            server.send(mine)
        self._sent_to += [self.servers[claim.id] for claim, _ in entries]

    def collect(self) -> list[AppendOutcome]:
        """As `Record.collect`, but never raises for an outage."""
        sent_to, self._sent_to = self._sent_to, []
        outcomes = {server.name: iter(server.collect()) for server in self.servers.parts}
        return [next(outcomes[server.name]) for server in sent_to]

    def finish_all(self, ends: Sequence[tuple[Claim, EndEvent]]) -> list[bool]:
        return self._note_each(ends, lambda end: end[0].id, Record.finish_all)

    def handed_all(self, claims: Sequence[Claim]) -> list[bool]:
        return self._note_each(claims, lambda claim: claim.id, Record.handed_all)

    def release_all(self, claims: Sequence[tuple[Claim, bool]]) -> list[bool]:
        return self._note_each(claims, lambda one: one[0].id, Record.release_all)

    def release(self, claim: Claim, *, failed: bool = False, delivered: bool = True, wait_s: float = 0.0) -> bool:
        server = self.servers[claim.id]
        give_back = partial(server.record.release, claim, failed=failed, delivered=delivered, wait_s=wait_s)
        return server.ask(give_back, False)

    def num_free(self, stage: Stage) -> int:
        return sum(server.ask(partial(server.record.num_free, stage), 0) for server in self.servers.parts)

    # Reading: raises where the request's server is away.

    def cancel(self, request_id: str) -> bool:
        return self.servers[request_id].record.cancel(request_id)

    def read_log(self, request_id: str, after_position: int = -1) -> list[TokenEvent | EndEvent]:
        return self.servers[request_id].record.read_log(request_id, after_position)

    def status(self, request_id: str) -> Status | None:
        return self.servers[request_id].record.status(request_id)

    def close(self) -> None:
        for server in self.servers.parts:
            server.record.close()

    def _dealt(self, items: Sequence[T], id_of: Callable[[T], str]) -> Iterator[tuple[_Server, list[T]]]:
        """The servers that have to do with any of the items, each with its own."""
        dealt: dict[int, list[T]] = {}
        for item in items:
            dealt.setdefault(choose_server(self.servers.names, id_of(item)), []).append(item)
        for index, mine in dealt.items():
            yield self.servers.parts[index], mine

    def _note_each(
        self, items: Sequence[T], id_of: Callable[[T], str], note: Callable[[Record, Sequence[T]], list[bool]]
    ) -> list[bool]:
        """Whether the servers noted the items, in their order; one that is away has not."""
        return self._each(
            items, id_of, lambda server, mine: server.ask(partial(note, server.record, mine), [False] * len(mine))
        )

    def _each(
        self, items: Sequence[T], id_of: Callable[[T], str], ask: Callable[[_Server, list[T]], list[R]]
    ) -> list[R]:
        """What the servers say of the items, in their order."""
        answers = {server.name: iter(ask(server, mine)) for server, mine in self._dealt(items, id_of)}
        return [next(answers[self.servers[id_of(item)].name]) for item in items]


class _ServerSession(Session):
    """A session on one of several servers."""

    def __init__(
        self, server: _Server, stage: Stage, name: str, parts: Callable[[], list[str]] = list, *, adopts: bool = False
    ) -> None:
        self._server = server
        super().__init__(server.record, stage, name, parts, adopts=adopts)

    def news(self) -> list[tuple[Claim, News]]:
        if self._server.is_away:
            with self._lock:
                self._lost += self._claims
                self._claims = set()
        return super().news()

    def disown(self) -> None:
        if not self._server.is_away:
            super().disown()

    def close(self) -> None:
        self.stop()
        if not self._server.is_away:
            super().close()

    def _open(self) -> None:
        try:
            self._server.keep()
            super()._open()
        except redis.RedisError as error:
            self._server.leave(error)

    def _renew(self) -> None:
        try:
            if self._server.is_away:
                self._begin_anew()
            else:
                super()._renew()
        except redis.RedisError as error:
            self._server.leave(error)

    def _begin_anew(self) -> None:
        before = self.id
        self._server.keep()
        super()._open()
        if before:
            self._record.reap(self._stage, 0, before)
        self._server.come_back()


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
        return BETWEEN.join(session.id for session in self._sessions.parts)

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
    def adopted(self) -> list[str]:
        """Parts of topics that nobody reads as a member, and this worker has to."""
        return self._sessions.parts[0].adopted

    def add(self, claim: Claim) -> None:
        """Tell what happens to this claim from now on."""
        self._sessions[claim.id].add(claim)

    def drop(self, claim: Claim) -> None:
        """Forget a claim: it ended, was handed off, released or lost."""
        self._sessions[claim.id].drop(claim)

    def news(self) -> list[tuple[Claim, News]]:
        """As `Session.news`, of all servers; claims of one that is away are lost."""
        return [one for session in self._sessions.parts for one in session.news()]

    def stop(self) -> None:
        """Renew no more: the sessions run out."""
        for session in self._sessions.parts:
            session.stop()

    def disown(self) -> None:
        """Read nothing any more. Raises `redis.RedisError`."""
        self._sessions.parts[0].disown()

    def close(self) -> None:
        """End the sessions: what they still hold is free at once."""
        for session in self._sessions.parts:
            session.close()


def connect_servers(text: str) -> ByServer["redis.Redis"]:
    """A worker's clients of all servers of an address list."""
    answer_s = {"answer_s": ANSWER_S} if len(split_urls(text)) > 1 else {}
    return ByServer.from_urls(text, lambda url: redis_client(url, **answer_s))


def record_on(clients: ByServer["redis.Redis"], pipeline: Pipeline, settings: RecordSettings) -> Record:
    """The records of a pipeline on its servers."""
    if len(clients.parts) == 1:
        return Record(clients.parts[0], pipeline, settings)
    return _SpreadRecord(clients, pipeline, settings)
