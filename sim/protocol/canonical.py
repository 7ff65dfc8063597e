"""One state of all those that go on alike, so that each is visited once."""

from functools import lru_cache
from typing import TypeVar

from sim.protocol.script import GHOST, MAX_ATTEMPTS, NEW, NOBODY, Message, Rec
from sim.protocol.state import FREE, IDLE, Out, Run, State, Worker

Numbers = tuple[int, ...]
Task = TypeVar("Task", Run, Out)
STALE = -1


def canonical(state: State, fenced: bool = True) -> State:
    """The same with the workers of a stage in a fixed order, and all names and epochs as small as may be.

    Of a worker that lost its claim nothing counts but what it would still do; all that needs the claim is refused, if
    the record is `fenced` as it should be.
    """
    saved = state.saved if state.left.losses else NEW
    epochs = (state.rec.epoch, saved.epoch)
    valid = epochs if state.rec.stage != "end" or not fenced or state.left.losses else (0, 0)
    mentioned = _in_record(state.rec) | _in_record(saved) | _in_bus(state.bus)
    for worker in state.workers:
        mentioned |= _in_worker(worker)
    names = tuple(sorted(mentioned))
    bus = _bus(state.bus, names)
    workers = [IDLE if worker == IDLE else _worker(worker, names, valid, fenced) for worker in state.workers]
    held = state.rec.session
    ranks = [hash((workers[n], n == held, tuple([one for one, at in bus if at == n]))) for n in range(4)]
    order = ([0, 1] if ranks[0] <= ranks[1] else [1, 0]) + ([2, 3] if ranks[2] <= ranks[3] else [3, 2])
    places = {old: new for new, old in enumerate(order)} | {FREE: FREE, GHOST: GHOST}
    return State(
        rec=_record(state.rec, names, epochs, places[state.rec.session]),
        saved=_record(saved, names, epochs, NOBODY if saved.session == NOBODY else GHOST),
        bus=tuple([(one, places[at]) for one, at in bus]),
        workers=tuple([workers[index] for index in order]),
        left=state.left,
        results=min(state.results, 3),
        letters=min(state.letters, 1),
        late=state.late,
        lost=state.lost,
        clock=3,
        next_name=len(names),
    )


@lru_cache(None)
def _in_record(rec: Rec) -> frozenset[int]:
    return frozenset((0, rec.bound)) | _in_messages((rec.message,))


@lru_cache(None)
def _in_bus(bus: tuple[tuple[Message, int], ...]) -> frozenset[int]:
    return _in_messages(tuple([message for message, _ in bus]))


@lru_cache(None)
def _in_worker(worker: Worker) -> frozenset[int]:
    run, out = worker.run, worker.out
    found = _in_messages(worker.inbox)
    if run is not None:
        found |= _in_messages((run.message, run.delivery))
    if out is not None:
        found |= _in_messages((out.message, out.delivery)) | {out.job}
    return found


def _in_messages(messages: tuple[Message | None, ...]) -> frozenset[int]:
    return frozenset([name for one in messages if one is not None for name in (one.name, one.job)])


def _message(old: Message, names: Numbers) -> Message:
    return old._replace(name=names.index(old.name), job=names.index(old.job))


@lru_cache(None)
def _bus(bus: tuple[tuple[Message, int], ...], names: Numbers) -> tuple[tuple[Message, int], ...]:
    return tuple([(_message(one, names), at) for one, at in bus])


@lru_cache(None)
def _record(old: Rec, names: Numbers, epochs: Numbers, session: int) -> Rec:
    return old._replace(
        epoch=_epoch(old.epoch, epochs),
        session=session,
        attempts=min(old.attempts, MAX_ATTEMPTS + 1),
        bound=names.index(old.bound),
        message=old.message and _message(old.message, names),
        tokens=(0,) * len(old.tokens),
    )


@lru_cache(None)
def _worker(old: Worker, names: Numbers, epochs: Numbers, fenced: bool) -> Worker:
    inbox = tuple(sorted([_message(one, names) for one in old.inbox]))
    run, out = old.run, old.out
    if run is not None:
        run = _task(run, names, epochs)
        if fenced and run.epoch == STALE:
            run = _lost(run)
    if out is not None:
        out = _task(out, names, epochs)._replace(job=names.index(out.job))
        if fenced and out.epoch == STALE and (out.done or (out.done is False and out.delivery is None)):
            out = None
    return old._replace(run=run, out=out, inbox=inbox)


def _lost(run: Run) -> Run:
    """A run whose claim is stale: it may hand off, or finds out and lets go."""
    if run.pc == "ship":
        return run._replace(cause="", diverged=False)
    computes = run.message.job == 0 and run.pc == "work" and run.tokens > 0
    return run._replace(pc="work", tokens=int(computes), cause="", diverged=False)


def _task(old: Task, names: Numbers, epochs: Numbers) -> Task:
    delivery = old.delivery and _message(old.delivery, names)
    return old._replace(epoch=_epoch(old.epoch, epochs), message=_message(old.message, names), delivery=delivery)


def _epoch(epoch: int, epochs: Numbers) -> int:
    """Of the record or of what it may fall back to; all others are stale for good."""
    if epoch == epochs[0]:
        return 2 if epoch else 0
    return 1 if epoch and epoch == epochs[1] else STALE if epoch else 0
