"""What the model knows at a moment: the record, the bus, four workers, and what may still go wrong."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from sim.protocol.script import NEW, NOBODY, End, Message, Rec, Reply

FREE = NOBODY
"""Who has a message instead of a worker: the bus; or `GHOST`, a member that is dead or does not read, as far as the bus
knows."""
POISONOUS = ("exhausted", "failed")


class Rules(NamedTuple):
    """What is explored: the lengths of things, and one flaw or none."""

    last: int = 2
    """Tokens of a whole answer; the first one is prefill's."""
    fail_attempts: int = 2
    two_steps: bool = False
    """A job is published, and then its request's delivery is finished; else both happen together."""
    retries: bool = True
    """What failed goes to a retry topic; else its delivery stays where it is, and is looked at again."""
    bus_knows: bool = True
    """The bus finds out who is dead. If it does not, each request still has to have its end in the log."""
    flaw: str = ""


class Budget(NamedTuple):
    """How often each may still happen."""

    crashes: int = 0
    pauses: int = 0
    """A session ends while its worker still works."""
    moves: int = 0
    """The bus takes a delivery from a worker that still works."""
    losses: int = 0
    """Redis falls back to what it had last written down: at first, nothing."""
    syncs: int = 0
    cancels: int = 0
    lates: int = 0
    stops: int = 0
    fails: int = 0
    asides: int = 0
    preempts: int = 0
    doubts: int = 0
    """A settlement is done, and its reply lost."""
    waits: int = 0
    """A message waits in a worker that has no room for it."""
    blinds: int = 0
    """A member lives, has a part of the topic, and does not read it."""


class Run(NamedTuple):
    """A claimed request in a worker. `pc`: wait (for its turn), work, ship (its blocks), finish."""

    pc: str
    epoch: int
    message: Message
    delivery: Message | None
    """None where it was taken over."""
    tokens: int
    cause: str = ""
    diverged: bool = False
    """Redis forgot tokens that this run goes on from."""
    lost: bool = False
    """The session that it was claimed with is over, and the loop has not heard of it yet."""


class Out(NamedTuple):
    """What is on its way through the settler. `kind`: job, result, drop, retry."""

    kind: str
    epoch: int
    message: Message
    delivery: Message | None
    end: End | None = None
    done: bool | None = None
    """Of a job: whether it was settled, until the record knows too."""
    job: int = 0
    """The job's id, once it was asked to be published."""
    published: bool = False
    """The job is durable, and its delivery is still to be finished."""


class Worker(NamedTuple):
    """What dies with a worker."""

    run: Run | None = None
    out: Out | None = None
    inbox: tuple[Message, ...] = ()
    stops: bool = False
    lives: bool = True
    """Whether its session is in `sessions`."""


class State(NamedTuple):
    """Everything. Workers 0 and 1 are prefill's, 2 and 3 decode's."""

    rec: Rec
    saved: Rec
    bus: tuple[tuple[Message, int], ...]
    workers: tuple[Worker, ...]
    left: Budget
    results: int = 0
    letters: int = 0
    late: bool = False
    lost: bool = False
    clock: int = 1
    next_name: int = 10


class Step(NamedTuple):
    """A transition: what happened, to whom, and what a script was asked and replied, if one was."""

    kind: str
    worker: int = NOBODY
    call: tuple[Any, ...] = ()
    reply: Reply | int | None = None


Steps = Iterator[tuple[Step, State]]
IDLE = Worker()


def start(left: Budget, requests: int = 1, other_body: bool = False) -> State:
    """A request in its topic, so often; and another one under the same id."""
    messages = [Message(n + 1) for n in range(requests)] + [Message(9, body=2)] * other_body
    return State(NEW, NEW, tuple((message, FREE) for message in messages), (IDLE,) * 4, left)


def change(state: State, index: int, worker: Worker, **others: Any) -> State:
    """The state with another worker, and what else is given."""
    workers = state.workers
    return state._replace(workers=(*workers[:index], worker, *workers[index + 1 :]), **others)


def stage_of(index: int) -> str:
    """Return the stage of a worker: the first two are prefill."""
    return "prefill" if index < 2 else "decode"


def holder(state: State, message: Message) -> int | None:
    """Who has a message; None if it is settled."""
    return next((at for found, at in state.bus if found == message), None)
