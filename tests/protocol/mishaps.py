"""What happens to the workers from outside: wishes, and everything that may go wrong."""

from tests.protocol import script
from tests.protocol.script import OUT, RUNS
from tests.protocol.state import FREE, GHOST, IDLE, Rules, State, Step, Steps, Worker, change, listed, runs_alone


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
    alone = runs_alone(state)
    if alone or (rec.lease == RUNS and left.pauses):
        after = state._replace(rec=rec._replace(lease=OUT), left=left._replace(pauses=left.pauses - (not alone)))
        yield Step("lease over", call=("lease over",)), after
    for place, (message, at) in enumerate(state.bus):
        if at == GHOST or (at != FREE and left.moves):
            after = state._replace(
                bus=(*state.bus[:place], (message, FREE), *state.bus[place + 1 :]),
                left=left._replace(moves=left.moves - (at != GHOST)),
            )
            yield Step("redeliver" if at == GHOST else "move"), after
    if left.losses:
        yield Step("lose", call=("lose",)), _forgotten(state)
    if left.syncs and left.losses:
        yield Step("sync", call=("sync",)), state._replace(saved=rec, left=left._replace(syncs=left.syncs - 1))
    for index, worker in enumerate(state.workers):
        holds = any(at == index for _, at in state.bus)
        if left.crashes and (worker != IDLE or holds):
            bus = tuple([(message, GHOST if at == index else at) for message, at in state.bus])
            after = change(state, index, IDLE, bus=bus, left=left._replace(crashes=left.crashes - 1))
            yield Step("crash", index), after
        if left.stops and not worker.stops and (worker != IDLE or holds):
            yield from _stop(state, rules, index)


def _stop(state: State, rules: Rules, index: int) -> Steps:
    """A worker is told to stop: it gives back what it works on, settles what it has asked for, and leaves."""
    worker, left = state.workers[index], state.left._replace(stops=state.left.stops - 1)
    if worker.run is not None and worker.run.pc == "finish":
        return  # the loop ends what it is at
    out = worker.out if worker.out and worker.out.kind == "job" and not worker.out.end else None
    task, step, after = worker.run or out, Step("stop", index), state
    if task is not None:
        step, after = release(state, rules, index, task.epoch, failed=False)
    stopping = worker._replace(run=None, stops=True, unlists=False)
    yield step._replace(kind="stop"), change(after, index, stopping, left=left)


def release(
    state: State, rules: Rules, index: int, epoch: int, *, failed: bool, waits: bool = False
) -> tuple[Step, State]:
    """A request is given back, to be left alone for a while if it `waits`."""
    rec, reply = script.release(state.rec, epoch, failed=failed, waits=waits, flaw=rules.flaw)
    state = state._replace(rec=rec, listed=listed(state, rules, index) if reply else state.listed)
    return Step("release", index, ("release", epoch, failed, waits), reply), state


def _forgotten(state: State) -> State:
    """Redis has only what it had written down."""
    num = len(state.saved.tokens)

    def mark(worker: Worker) -> Worker:
        run = worker.run
        return worker._replace(run=run._replace(diverged=True)) if run and run.tokens > num else worker

    return state._replace(
        rec=state.saved,
        workers=tuple([mark(worker) for worker in state.workers]),
        listed=(False, False),
        left=state.left._replace(losses=state.left.losses - 1, syncs=0),
        lost=True,
    )
