"""A state of the model: the record, the bus, four workers, and the mishaps that may still happen."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.names import Stage
from sim.protocol.script import NEW, End, Message, Reply, RequestRecord

FREE = -1
"""The holder of a message that no worker has: the bus. `GHOST` is a member that is dead or does not
read, which the bus has not noticed."""
POISONOUS = ("exhausted", "failed")


class Rules(NamedTuple):
    """The rules of an exploration: the length of an answer, limits, and one flaw or none."""

    last: int = 2
    """Number of tokens of a whole answer. Prefill samples the first one."""
    fail_attempts: int = 2
    two_steps: bool = False
    """Whether a job is published before its request's delivery is finished, rather than in one transaction."""
    retries: bool = True
    """Whether a failed request goes to a retry topic, rather than staying with its worker."""
    bus_knows: bool = True
    """Whether the bus notices dead members. If not, each request must still get its end in the log."""
    stays: tuple[bool, bool] = (False, False)
    """Flags of the two workers that read requests: True for one that may decode them too. Others hand them off."""
    flaw: str = ""


class Budget(NamedTuple):
    """The number of times that each mishap may still happen."""

    crashes: int = 0
    pauses: int = 0
    """A worker's session ends while the worker goes on."""
    moves: int = 0
    """The bus takes a delivery from a living worker."""
    losses: int = 0
    """Redis falls back to its last saved state, which is empty at first."""
    syncs: int = 0
    cancels: int = 0
    lates: int = 0
    stops: int = 0
    fails: int = 0
    asides: int = 0
    preempts: int = 0
    doubts: int = 0
    """A settlement is done, but its reply is lost."""
    waits: int = 0
    """A message waits in a worker without capacity for it."""
    blinds: int = 0
    """A living member owns a partition and does not read it."""
    delays: int = 0
    """A worker claims with a delivery that it does not hold any more, because it learns of the loss later."""
    forgets: int = 0
    """While no worker is there, the brokers forget committed offsets, and the record expires."""
    deletes: int = 0
    """The bus deletes a request that no living worker has."""
    returns: int = 0
    """A decode worker finds that KV inside a picture is lost, which only prefill can compute again."""


class Run(NamedTuple):
    """A claimed request in a worker. Phases: wait (in the queue), work, ship (store KV blocks), finish."""

    phase: str
    epoch: int
    message: Message
    delivery: Message | None
    """None if the request was taken over."""
    tokens: int
    cause: str = ""
    follows: bool = False
    """Whether a claim before this one may have sent the request on, as a job or to be tried again."""
    diverged: bool = False
    """Redis lost tokens that this run continues from."""
    lost: bool = False
    """The session of its claim is over, and the loop has not noticed yet."""
    is_stale: bool = False
    """The delivery was lost and came to this worker again, which is another delivery to the bus."""


class PendingOutput(NamedTuple):
    """An output that the settler has not settled yet. Kinds: job, result, drop, retry."""

    kind: str
    epoch: int
    message: Message
    delivery: Message | None
    end: End | None = None
    done: bool | None = None
    """For a job: whether it was settled, until that is noted in the record."""
    job: int = 0
    """The job's id, once there was an attempt to publish it."""
    published: bool = False
    """The job is durable, but its delivery is not finished yet."""
    is_stale: bool = False
    """As of a `Run`."""


class Worker(NamedTuple):
    """The memory of a worker, which is lost when it crashes."""

    run: Run | None = None
    out: PendingOutput | None = None
    inbox: tuple[Message, ...] = ()
    stops: bool = False
    lives: bool = True
    """Whether its session is in `sessions`."""


class State(NamedTuple):
    """The whole state. Workers 0 and 1 read requests, 2 and 3 jobs."""

    rec: RequestRecord
    saved: RequestRecord
    bus: tuple[tuple[Message, int], ...]
    workers: tuple[Worker, ...]
    left: Budget
    results: int = 0
    letters: int = 0
    late: bool = False
    lost: bool = False
    clock: int = 1
    next_name: int = 10
    settled: tuple[Message, ...] = ()
    """Messages that were settled, where commits may yet be forgotten and that is not noted in Redis."""
    deleted: bool = False


class Step(NamedTuple):
    """A transition: its kind, its worker, and the script that it called, if any, with the reply."""

    kind: str
    worker: int = FREE
    call: tuple[Any, ...] = ()
    reply: Reply | int | None = None


Steps = Iterator[tuple[Step, State]]
IDLE = Worker()


def make_start_state(left: Budget, requests: int = 1, other_body: bool = False) -> State:
    """Return the first state: copies of a request in its topic, and perhaps another body under the same id."""
    messages = [Message(n + 1) for n in range(requests)] + [Message(9, body=2)] * other_body
    return State(NEW, NEW, tuple((message, FREE) for message in messages), (IDLE,) * 4, left)


def replace_worker(state: State, index: int, worker: Worker, **others: Any) -> State:
    """Return the state with one worker, and the fields in `others`, replaced."""
    workers = state.workers
    return state._replace(workers=(*workers[:index], worker, *workers[index + 1 :]), **others)


def stage_of(index: int) -> Stage:
    """Return the stage of a worker: the first two are prefill."""
    return "prefill" if index < 2 else "decode"


def find_holder(state: State, message: Message) -> int | None:
    """Return the worker that has a message, `FREE` or `GHOST`; None if the message is settled."""
    return next((at for found, at in state.bus if found == message), None)
