"""The records of requests that are spread over several servers: a worker has a `Record` and a `Session` on each.

A server that is away is an outage of its own requests alone. These steps follow when a server does not answer:

    1  the thread that notices it, the loop's or the session's, marks the server as away. From then on no calls are sent
       to it: claims are postponed, and all other calls return the value for a lost claim
    2  the worker learns that its claims there are lost, drops them, and keeps their deliveries
    3  the session's thread retries. When the server answers, the thread opens a new session and ends the one before,
       with all claims that it held. From then on requests are claimed again

A crash at any of these steps costs what the death of a worker costs, on that server alone.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypedDict, TypeVar, Unpack

import redis

from penstock.config.settings import RecordSettings
from penstock.messages import EndEvent, TokenEvent
from penstock.names import Pipeline, Stage
from penstock.record.claim import AppendOutcome, Bound, Busy, Claim, ClaimEvent, Conflict, TakenOver
from penstock.record.log import RequestStatus
from penstock.record.record import Record, UnclaimedMessage, check_server_key_types
from penstock.record.session import Session
from penstock.redis.client import is_outage, learn_pace, redis_client
from penstock.redis.scripts import ScriptCall
from penstock.redis.servers import Sharded, choose_server, store_server_list
from penstock.redis.urls import split_urls

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

SERVER_TIMEOUT_S = 0.5
"""One of several servers counts as away if it does not answer within this time. It is short, as the loop waits for it,
and with it the requests on other servers. If a server was only slow, little is lost: computed KV stays in the pool."""
AWAY_RETRY_S = 1.0
"""After this time the claim of a request is tried again whose server is away."""
ID_SEPARATOR = "\n"
"""Separates the ids of a worker's sessions, one for each server, in `ShardedSession.id`."""


class _Server:
    """One of several servers, as a worker knows it. Only the loop sends tokens and collects outcomes."""

    def __init__(self, name: str, record: Record, keep: Callable[[], None]) -> None:
        """`keep` stores the list of all servers on this one, see `penstock.redis.servers.store_server_list`."""
        self.name, self.record, self.store_list = name, record, keep
        self.is_away = False
        self.reason = ""
        self._num_sent, self._has_missed = 0, False

    def call_or_default(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what `call` returns; `otherwise` where the server is away. Raise errors that are no outage."""
        if self.is_away:
            return otherwise
        try:
            return call()
        except redis.RedisError as error:
            self.mark_away(error)
            return otherwise

    def mark_away(self, error: redis.RedisError) -> None:
        """Note that the server is away. Raise the error if it is no outage."""
        if not is_outage(error):
            raise error
        if not self.is_away:
            log.warning("Redis %s is not reachable, its requests wait: %s", self.name, error)
        self.is_away, self.reason = True, str(error)

    def mark_back(self) -> None:
        """Note that the server answers."""
        if self.is_away:
            log.info("Redis %s is reachable again", self.name)
        self.is_away, self.reason = False, ""

    def send_tokens(self, entries: Sequence[tuple[Claim, TokenEvent]]) -> None:
        """Send tokens to their logs."""
        self._num_sent += len(entries)
        self.call_or_default(partial(self.record.send_tokens, entries), None)
        self._has_missed |= self.is_away

    def collect_outcomes(self, *, waits: bool) -> list[AppendOutcome]:
        """Return the outcomes of all tokens sent since the last call; unless it `waits`, of the first that have come.

        They are all `FENCED` if the server was away meanwhile: it may be unknown which of them were written. The next
        claim of a request reads its log and finds that out.
        """
        if not self._num_sent:
            return []
        outcomes: list[AppendOutcome] = self.call_or_default(partial(self._collect_soon, waits=waits), [])
        if not self.is_away and not self._has_missed and (len(outcomes) == self._num_sent or not waits):
            self._num_sent -= len(outcomes)
            return outcomes
        num_sent, self._num_sent, self._has_missed = self._num_sent, 0, False
        self.record.forget_sent_tokens()
        return [AppendOutcome.FENCED] * num_sent

    def _collect_soon(self, *, waits: bool) -> list[AppendOutcome]:
        if waits and not self.record.wait_for_outcome(self.record.pace.stretch(SERVER_TIMEOUT_S)):
            raise redis.TimeoutError("no answer to tokens that were sent")
        return self.record.collect_outcomes(waits=waits)


def _store_list(client: "redis.Redis", pipeline: Pipeline, names: Sequence[str]) -> None:
    """Store the list of all servers on one, once it is known how late it answers."""
    learn_pace(client, SERVER_TIMEOUT_S)
    store_server_list(client, pipeline, names)


class _ShardedRecord(Record):
    """`Record` over several servers.

    For requests of a server that is away, claims return `Busy`, and other methods return the value for a lost claim.

    The argument `session` of its methods is a `ShardedSession.id`.
    """

    def __init__(self, clients: Sharded["redis.Redis"], pipeline: Pipeline, settings: RecordSettings) -> None:
        super().__init__(clients.parts[0], pipeline, settings)

        def server(name: str, client: "redis.Redis") -> _Server:
            record = Record(client, pipeline, settings)
            return _Server(name, record, partial(_store_list, client, pipeline, clients.names))

        self.servers = Sharded(clients.names, list(map(server, clients.names, clients.parts)))
        self._sent_to: deque[str] = deque()
        """The server of each sent token whose outcome was not returned yet."""
        self._arrived: dict[str, deque[AppendOutcome]] = {name: deque() for name in clients.names}
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

    def park_messages(self, stage: Stage, waiting: Sequence[UnclaimedMessage]) -> list[UnclaimedMessage]:
        left: list[UnclaimedMessage] = []
        for server, mine in self._group_by_server(waiting, lambda one: one.id):
            left += server.call_or_default(partial(server.record.park_messages, stage, mine), mine)
        return left

    def take_over_free(self, stage: Stage, session: str, max_requests: int) -> list[TakenOver]:
        """Take over free requests as `Record.take_over_free` does. Each call begins with another server."""
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
        self._sent_to += [self.servers[claim.id].name for claim, _ in entries]

    def collect_outcomes(self, *, waits: bool = True) -> list[AppendOutcome]:
        """Return the outcomes as `Record.collect_outcomes` does, but raise nothing for an outage."""
        for server in self.servers.parts:
            self._arrived[server.name] += server.collect_outcomes(waits=waits)
        outcomes = []
        while self._sent_to and self._arrived[self._sent_to[0]]:
            outcomes.append(self._arrived[self._sent_to.popleft()].popleft())
        return outcomes

    def wait_for_outcome(self, timeout_s: float) -> bool:
        """Return whether each server that is not away has sent a reply within a time, or owes none."""
        return all(
            server.call_or_default(partial(server.record.wait_for_outcome, timeout_s), True)
            for server in self.servers.parts
        )

    def finish_all(self, ends: Sequence[tuple[Claim, EndEvent, str]]) -> list[AppendOutcome]:
        return self._note_on_servers(ends, lambda end: end[0].id, Record.finish_all, AppendOutcome.FENCED)

    def note_all_handed_off(self, claims: Sequence[Claim]) -> list[bool]:
        return self._note_on_servers(claims, lambda claim: claim.id, Record.note_all_handed_off, False)

    def release_all(self, claims: Sequence[tuple[Claim, bool]]) -> list[bool]:
        return self._note_on_servers(claims, lambda one: one[0].id, Record.release_all, False)

    def release_claim(self, claim: Claim, *, failed: bool = False, delivered: bool = True, wait_s: float = 0.0) -> bool:
        server = self.servers[claim.id]
        give_back = partial(server.record.release_claim, claim, failed=failed, delivered=delivered, wait_s=wait_s)
        return server.call_or_default(give_back, False)

    def adopt_partitions(self, session: str, topics: Sequence[str], unnamed: Sequence[str] = ()) -> list[str]:
        """Adopt partitions as `Record.adopt_partitions` does, on the first server. Raise where it is away."""
        return super().adopt_partitions(session.split(ID_SEPARATOR, maxsplit=1)[0], topics, unnamed)

    def count_free(self, stage: Stage) -> int:
        return sum(server.call_or_default(partial(server.record.count_free, stage), 0) for server in self.servers.parts)

    # Reading. These methods raise where the request's server is away.

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
        """Yield the servers of the items, each with its own items."""
        dealt: dict[int, list[T]] = {}
        for item in items:
            dealt.setdefault(choose_server(self.servers.names, id_of(item)), []).append(item)
        for index, mine in dealt.items():
            yield self.servers.parts[index], mine

    def _note_on_servers(
        self, items: Sequence[T], id_of: Callable[[T], str], note: Callable[[Record, Sequence[T]], list[R]], lost: R
    ) -> list[R]:
        """Return for each item whether its server noted it; `lost` where the server is away."""
        return self._ask_servers(
            items,
            id_of,
            lambda server, mine: server.call_or_default(partial(note, server.record, mine), [lost] * len(mine)),
        )

    def _ask_servers(
        self, items: Sequence[T], id_of: Callable[[T], str], ask: Callable[[_Server, list[T]], list[R]]
    ) -> list[R]:
        """Return the servers' answers, in the order of the items."""
        answers = {server.name: iter(ask(server, mine)) for server, mine in self._group_by_server(items, id_of)}
        return [next(answers[self.servers[id_of(item)].name]) for item in items]


class _SessionOptions(TypedDict, total=False):
    """What `Session` may be given beside its record and its name."""

    list_partitions: Callable[[], list[str]]
    renew_membership: Callable[[float], Sequence[ScriptCall]]
    is_stalled: Callable[[], bool]
    keep: Callable[[Session], None] | None


class _ServerSession(Session):
    """A session on one of several servers."""

    def __init__(self, server: _Server, name: str, **options: Unpack[_SessionOptions]) -> None:
        self._server = server
        super().__init__(server.record, name, **options)

    def collect_events(self) -> list[tuple[Claim, ClaimEvent]]:
        if self._server.is_away:
            with self._lock:
                self._lost += self._claims
                self._claims = {}
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

    def _renew_session(self, beside: ScriptCall | None) -> None:
        try:
            if self._server.is_away:
                self._begin_anew()
            else:
                super()._renew_session(beside)
        except redis.RedisError as error:
            self._server.mark_away(error)

    def _begin_anew(self) -> None:
        before = self.id
        self._server.store_list()
        super()._open_session()
        if before:
            self._record.end_expired_sessions(0, before)
        self._server.mark_back()


class ShardedSession:
    """A worker's sessions, one on each server of its record, with the methods of `Session`."""

    def __init__(self, record: Record, name: str, **options: Unpack[_SessionOptions]) -> None:
        """Open the sessions.

        The one on the first server, where the bus is, names the partitions that are read, keeps the worker's place in
        its group, and is given to `keep`. The others have a thread each: a server that is slow holds up no renewal on
        another.
        """
        if not isinstance(record, _ShardedRecord):
            self._sessions = Sharded([""], [Session(record, name, **options)])
            return
        first, *others = record.servers.parts
        is_stalled = options.get("is_stalled", lambda: False)
        made: list[Session] = [_ServerSession(first, name, **options)]
        made += [_ServerSession(server, name, is_stalled=is_stalled) for server in others]
        self._sessions = Sharded(record.servers.names, made)

    @property
    def id(self) -> str:
        """The ids of the servers' sessions, in the order of the servers."""
        return ID_SEPARATOR.join(session.id for session in self._sessions.parts)

    def count_free(self, stage: Stage) -> int:
        """Return how many requests of a stage any worker may take over, as far as is known."""
        return sum(session.num_free[stage] for session in self._sessions.parts)

    def note_taken(self, stage: Stage, num_taken: int) -> None:
        """Subtract taken requests from the counts of free ones, until the sessions read the counts again."""
        for session in self._sessions.parts:
            here = min(num_taken, session.num_free[stage])
            session.num_free[stage] -= here
            num_taken -= here

    def server_now_s(self) -> float:
        """Return the time by the clock of the first server, in seconds since the epoch."""
        return self._sessions.parts[0].server_now_s()

    @property
    def claims(self) -> set[Claim]:
        """The claims that are watched now, on all servers."""
        return {claim for session in self._sessions.parts for claim in session.claims}

    def add_claim(self, claim: Claim) -> None:
        """Watch a claim: `collect_events` returns what happens to it."""
        self._sessions[claim.id].add_claim(claim)

    def remove_claim(self, claim: Claim) -> None:
        """Forget a claim that ended, was handed off, released or lost."""
        self._sessions[claim.id].remove_claim(claim)

    def collect_events(self) -> list[tuple[Claim, ClaimEvent]]:
        """Return the events of all servers, see `Session.collect_events`. Claims on a server that is away are lost."""
        return [one for session in self._sessions.parts for one in session.collect_events()]

    def stop(self) -> None:
        """Stop renewing, so that the sessions expire."""
        for session in self._sessions.parts:
            session.stop()

    def disown_partitions(self) -> None:
        """Give up all partitions, as this worker leaves its group. Raise `redis.RedisError`."""
        self._sessions.parts[0].disown_partitions()

    def close(self) -> None:
        """End the sessions: the requests that they still hold are free at once."""
        for session in self._sessions.parts:
            session.close()


def connect_servers(text: str) -> Sharded["redis.Redis"]:
    """Return a worker's clients of the servers in a setting."""
    answer_s = {"answer_s": SERVER_TIMEOUT_S} if len(split_urls(text)) > 1 else {}
    return Sharded.from_urls(text, lambda url: redis_client(url, **answer_s))


def check_key_types(clients: Sharded["redis.Redis"], pipeline: Pipeline) -> None:
    """Check the types of the keys that workers share, before one says that it is ready.

    One of several servers is left out while it is away. Raise `StateMismatch` for a type that another version left.
    """
    expected = pipeline.list_key_types()
    for name, client in zip(clients.names, clients.parts, strict=True):
        try:
            check_server_key_types(client, expected, name)
        except redis.RedisError as error:
            if len(clients.parts) == 1 or not is_outage(error):
                raise


def open_record(clients: Sharded["redis.Redis"], pipeline: Pipeline, settings: RecordSettings) -> Record:
    """Return the records of a pipeline on its servers."""
    if len(clients.parts) == 1:
        return Record(clients.parts[0], pipeline, settings)
    return _ShardedRecord(clients, pipeline, settings)
