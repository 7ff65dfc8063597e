"""Maps states with the same future to one of them, so that the exploration visits each only once."""

from functools import lru_cache
from typing import TypeVar

from sim.protocol.script import GHOST, MAX_ATTEMPTS, NEW, NOBODY, Message, RequestRecord
from sim.protocol.state import FREE, IDLE, PendingOutput, Run, State, Worker

Numbers = tuple[int, ...]
Task = TypeVar("Task", Run, PendingOutput)
STALE = -1


def canonicalize_state(state: State, fenced: bool = True, are_alike: bool = True) -> State:
    """Return an equivalent state: the workers of a stage in a fixed order, all names and epochs as small as possible.

    The workers that read requests are reordered if they are of one kind (`are_alike`). If the record is `fenced`, as it
    should be, a worker without a valid claim is reduced to what it can still do: whatever needs it is refused anyway.
    """
    saved = state.saved if state.left.losses else NEW
    epochs = (state.rec.epoch, saved.epoch)
    valid = epochs if state.rec.stage != "end" or not fenced or state.left.losses else (0, 0)
    mentioned = _collect_record_names(state.rec) | _collect_record_names(saved) | _collect_bus_names(state.bus)
    mentioned |= _collect_message_names(state.settled)
    for worker in state.workers:
        mentioned |= _collect_worker_names(worker)
    names = tuple(sorted(mentioned))
    bus = _rename_bus(state.bus, names)
    workers = [IDLE if worker == IDLE else _rename_worker(worker, names, valid, fenced) for worker in state.workers]
    held = state.rec.session
    ranks = [hash((workers[n], n == held, tuple([one for one, at in bus if at == n]))) for n in range(4)]
    order = ([0, 1] if ranks[0] <= ranks[1] or not are_alike else [1, 0]) + ([2, 3] if ranks[2] <= ranks[3] else [3, 2])
    places = {old: new for new, old in enumerate(order)} | {FREE: FREE, GHOST: GHOST}
    return State(
        rec=_rename_record(state.rec, names, epochs, NOBODY if held is NOBODY else places[held]),
        saved=_rename_record(saved, names, epochs, NOBODY if saved.session == NOBODY else GHOST),
        bus=tuple([(one, places[at]) for one, at in bus]),
        workers=tuple([workers[index] for index in order]),
        left=state.left,
        results=min(state.results, 3),
        letters=min(state.letters, 1),
        late=state.late,
        lost=state.lost,
        clock=3,
        next_name=len(names),
        settled=tuple(sorted([_rename_message(one, names) for one in state.settled])) if state.left.forgets else (),
        deleted=state.deleted,
    )


@lru_cache(None)
def _collect_record_names(rec: RequestRecord) -> frozenset[int]:
    return frozenset((0, rec.bound or 0)) | _collect_message_names((rec.message,))


@lru_cache(None)
def _collect_bus_names(bus: tuple[tuple[Message, int], ...]) -> frozenset[int]:
    return _collect_message_names(tuple([message for message, _ in bus]))


@lru_cache(None)
def _collect_worker_names(worker: Worker) -> frozenset[int]:
    run, out = worker.run, worker.out
    found = _collect_message_names(worker.inbox)
    if run is not None:
        found |= _collect_message_names((run.message, run.delivery))
    if out is not None:
        found |= _collect_message_names((out.message, out.delivery)) | {out.job}
    return found


def _collect_message_names(messages: tuple[Message | None, ...]) -> frozenset[int]:
    return frozenset([name for one in messages if one is not None for name in (one.name, one.job)])


def _rename_message(old: Message, names: Numbers) -> Message:
    return old._replace(name=names.index(old.name), job=names.index(old.job))


@lru_cache(None)
def _rename_bus(bus: tuple[tuple[Message, int], ...], names: Numbers) -> tuple[tuple[Message, int], ...]:
    return tuple([(_rename_message(one, names), at) for one, at in bus])


@lru_cache(None)
def _rename_record(old: RequestRecord, names: Numbers, epochs: Numbers, session: int | None) -> RequestRecord:
    return old._replace(
        epoch=_rank_epoch(old.epoch, epochs),
        session=session,
        attempts=min(old.attempts, MAX_ATTEMPTS + 1),
        bound=names.index(old.bound or 0),
        message=old.message and _rename_message(old.message, names),
        tokens=(0,) * len(old.tokens),
    )


@lru_cache(None)
def _rename_worker(old: Worker, names: Numbers, epochs: Numbers, fenced: bool) -> Worker:
    inbox = tuple(sorted([_rename_message(one, names) for one in old.inbox]))
    run, out = old.run, old.out
    if run is not None:
        run = _rename_task(run, names, epochs)
        if fenced and run.epoch == STALE:
            run = _reduce_stale_run(run)
    if out is not None:
        out = _rename_task(out, names, epochs)._replace(job=names.index(out.job))
        if fenced and out.epoch == STALE and (out.done or (out.done is False and out.delivery is None)):
            out = None
    return old._replace(run=run, out=out, inbox=inbox)


def _reduce_stale_run(run: Run) -> Run:
    """Return a run with a stale claim, reduced: it may still hand off, or it finds out and drops the request."""
    if run.phase == "ship":
        return run._replace(cause="", follows=False, diverged=False)
    computes = run.message.job == 0 and run.phase == "work" and run.tokens > 0
    return run._replace(phase="work", tokens=int(computes), cause="", follows=False, diverged=False)


def _rename_task(old: Task, names: Numbers, epochs: Numbers) -> Task:
    delivery = old.delivery and _rename_message(old.delivery, names)
    return old._replace(
        epoch=_rank_epoch(old.epoch, epochs), message=_rename_message(old.message, names), delivery=delivery
    )


def _rank_epoch(epoch: int, epochs: Numbers) -> int:
    """Return 2 for the record's epoch, 1 for that of the saved record, 0 for none, and `STALE` for all others."""
    if epoch == epochs[0]:
        return 2 if epoch else 0
    return 1 if epoch and epoch == epochs[1] else STALE if epoch else 0
