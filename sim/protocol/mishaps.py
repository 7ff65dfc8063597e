"""What happens to the workers from outside: wishes, and everything that may go wrong."""

from sim.protocol import script
from sim.protocol.script import GHOST, LATER, NOBODY, Rec
from sim.protocol.state import FREE, IDLE, Rules, State, Step, Steps, Worker, change


def wishes(state: State) -> Steps:
    """Somebody cancels the request, or its deadline passes."""
    left = state.left
    if left.cancels:
        rec, reply = script.cancel(state.rec)
        after = state._replace(rec=rec, left=left._replace(cancels=left.cancels - 1))
        yield Step("cancel", call=("cancel",), reply=reply), after
    if left.lates:
        yield Step("late"), state._replace(late=True, left=left._replace(lates=0))


def mishaps(state: State, rules: Rules) -> Steps:
    """Crashes, pauses, rebalances, worker stops, and Redis losing what it had."""
    left, rec = state.left, state.rec
    yield from _sessions_over(state, rules)
    if rec.waits or LATER in rec.free:
        yield Step("due", call=("due",)), state._replace(rec=script.due(rec))
    yield from _redeliveries(state, rules)
    if left.losses:
        yield Step("lose", call=("lose",)), _forgotten(state)
    if left.syncs and left.losses:
        yield Step("sync", call=("sync",)), state._replace(saved=rec, left=left._replace(syncs=left.syncs - 1))
    for index, worker in enumerate(state.workers):
        holds = any(at == index for _, at in state.bus)
        if left.crashes and (worker != IDLE or holds):
            bus = tuple([(message, GHOST if at == index else at) for message, at in state.bus])
            rec_after = rec._replace(session=GHOST) if rec.session == index else rec
            after = change(state, index, IDLE, bus=bus, rec=rec_after, left=left._replace(crashes=left.crashes - 1))
            yield Step("crash", index, call=("crash", index)), after
        if left.stops and not worker.stops and (worker != IDLE or holds):
            yield from _stop(state, index)


def _sessions_over(state: State, rules: Rules) -> Steps:
    """Whose session is over is found out by any other worker: dead ones, or some that were merely held up."""
    if state.rec.session == GHOST:
        rec = script.reap(state.rec, (GHOST,), rules.flaw)
        yield Step("reap", call=("reap", GHOST)), state._replace(rec=rec)
    for index, worker in enumerate(state.workers):
        if state.left.pauses and worker.lives and (worker != IDLE or state.rec.session == index):
            rec, left = script.reap(state.rec, (index,), rules.flaw), state.left._replace(pauses=state.left.pauses - 1)
            yield (
                Step("reap", call=("reap", index)),
                change(state, index, worker._replace(lives=False), rec=rec, left=left),
            )


def _redeliveries(state: State, rules: Rules) -> Steps:
    left = state.left
    for place, (message, at) in enumerate(state.bus):
        before, behind = state.bus[:place], state.bus[place + 1 :]
        if (at == GHOST and rules.bus_knows) or (at not in (GHOST, FREE) and left.moves):
            fewer = left._replace(moves=left.moves - (at != GHOST))
            after = state._replace(bus=(*before, (message, FREE), *behind), left=fewer)
            yield Step("redeliver" if at == GHOST else "move"), after
        if at == FREE and left.blinds:
            fewer = left._replace(blinds=left.blinds - 1)
            yield Step("blind"), state._replace(bus=(*before, (message, GHOST), *behind), left=fewer)


def _stop(state: State, index: int) -> Steps:
    """A worker is told to stop: it gives back what it works on, settles what it has asked for, and leaves."""
    worker, left = state.workers[index], state.left._replace(stops=state.left.stops - 1)
    if worker.run is not None and worker.run.pc == "finish":
        return  # the loop ends what it is at
    out = worker.out if worker.out and worker.out.kind == "job" and not worker.out.end else None
    task, step, after = worker.run or out, Step("stop", index), state
    if task is not None:
        delivered = task.delivery is not None
        step, after = release(state, index, task.epoch, failed=False, delivered=delivered)
    yield step._replace(kind="stop"), change(after, index, worker._replace(run=None, stops=True), left=left)


def release(
    state: State, index: int, epoch: int, *, failed: bool, delivered: bool, waits: bool = False
) -> tuple[Step, State]:
    """A request is given back, to be left alone for a while if it `waits`."""
    rec, reply = script.release(state.rec, epoch, failed=failed, waits=waits, delivered=delivered)
    return Step("release", index, ("release", epoch, failed, waits, delivered), reply), state._replace(rec=rec)


def _forgotten(state: State) -> State:
    """Redis has only what it had written down. Each worker finds its session missing, or older than it should be: it
    opens another, and what the old one seems to hold is free once that is over.
    """
    saved: Rec = state.saved._replace(session=NOBODY if state.saved.session == NOBODY else GHOST)

    def mark(worker: Worker) -> Worker:
        run = worker.run
        if run is not None and run.tokens > len(saved.tokens):
            worker = worker._replace(run=run._replace(diverged=True))
        return worker if worker == IDLE else worker._replace(lives=False)

    return state._replace(
        rec=saved,
        workers=tuple([mark(worker) for worker in state.workers]),
        left=state.left._replace(losses=state.left.losses - 1, syncs=0),
        lost=True,
    )
