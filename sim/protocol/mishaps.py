"""Steps from outside the workers: a cancellation, a deadline, and everything that may go wrong."""

from sim.protocol import script
from sim.protocol.script import GHOST, LATER, NEW, NOBODY, RequestRecord
from sim.protocol.state import FREE, IDLE, Rules, State, Step, Steps, Worker, replace_worker


def generate_client_steps(state: State, rules: Rules) -> Steps:
    """Generate the steps of a client: it cancels the request, its deadline passes, or it finds the message gone."""
    left = state.left
    if left.cancels:
        rec, reply = script.cancel_request(state.rec)
        after = state._replace(rec=rec, left=left._replace(cancels=left.cancels - 1))
        yield Step("cancel", call=("cancel",), reply=reply), after
    if left.lates:
        yield Step("late"), state._replace(late=True, left=left._replace(lates=0))
    if state.deleted and rules.flaw != "nobody ends what is gone":
        rec, is_ended = script.end_unread(state.rec)
        yield Step("unread", call=("unread",), reply=is_ended), state._replace(rec=rec) if is_ended else state


def generate_mishaps(state: State, rules: Rules) -> Steps:
    """Generate crashes, pauses, rebalances, worker stops, losses of data in Redis, and what the bus forgets."""
    left, rec = state.left, state.rec
    yield from _generate_session_ends(state, rules)
    yield from _forget_commits(state, rules)
    for place, (message, at) in enumerate(state.bus):
        if left.deletes and message.job == 0 and at in (FREE, GHOST):
            bus, fewer = (*state.bus[:place], *state.bus[place + 1 :]), left._replace(deletes=left.deletes - 1)
            yield Step("delete"), state._replace(bus=bus, left=fewer, deleted=True)
    if rec.not_before_ms or LATER in rec.free:
        yield Step("due", call=("due",)), state._replace(rec=script.pass_waiting_times(rec))
    yield from _generate_redeliveries(state, rules)
    if left.losses:
        yield Step("lose", call=("lose",)), _restore_saved_record(state)
    if left.syncs and left.losses:
        yield Step("sync", call=("sync",)), state._replace(saved=rec, left=left._replace(syncs=left.syncs - 1))
    for index, worker in enumerate(state.workers):
        holds = any(at == index for _, at in state.bus)
        if left.crashes and (worker != IDLE or holds):
            bus = tuple([(message, GHOST if at == index else at) for message, at in state.bus])
            rec_after = rec._replace(session=GHOST) if rec.session == index else rec
            after = replace_worker(
                state, index, IDLE, bus=bus, rec=rec_after, left=left._replace(crashes=left.crashes - 1)
            )
            yield Step("crash", index, call=("crash", index)), after
        if left.stops and not worker.stops and (worker != IDLE or holds):
            yield from _stop_worker(state, index)


def _forget_commits(state: State, rules: Rules) -> Steps:
    """Generate the steps of a pipeline that is off for long: settled messages without a note come again, and the
    record of the request may have expired. A worker that reads a message then knows whether the request is among the
    last results.
    """
    if state.settled:
        yield Step("note"), state._replace(settled=())
    is_off = all(worker == IDLE for worker in state.workers) and state.rec.session == NOBODY
    if state.left.forgets and is_off and all(at in (FREE, GHOST) for _, at in state.bus):
        is_answered = state.results > 0 and rules.flaw != "answers what was forgotten"
        found = (*state.bus, *[(message, FREE) for message in state.settled])
        bus = tuple([(message._replace(is_answered=is_answered), at) for message, at in found])
        after = state._replace(bus=bus, settled=(), left=state.left._replace(forgets=state.left.forgets - 1))
        yield Step("forget commits", call=("forget",)), after
        expired, rec = NEW._replace(epoch=state.clock), state.rec
        yield Step("expire", call=("forget",)), after._replace(rec=expired)
        if rec.stage == "end" and rec.bound:  # the id is remembered: that tells of all messages but the bound one
            is_mine = [(message.job or message.name) == rec.bound for message, _ in bus]
            told = tuple(
                [
                    (message if mine else message._replace(is_answered=False), at)
                    for (message, at), mine in zip(bus, is_mine, strict=True)
                ]
            )
            remembered = expired._replace(bound=rec.bound, body=rec.body)
            yield Step("expire", call=("forget",)), after._replace(rec=remembered, bus=told)


def _generate_session_ends(state: State, rules: Rules) -> Steps:
    """Generate the end of each session that another worker may end: of dead workers, or of slow ones."""
    if state.rec.session == GHOST:
        rec = script.end_sessions(state.rec, (GHOST,), rules.flaw)
        yield Step("reap", call=("reap", GHOST)), state._replace(rec=rec)
    for index, worker in enumerate(state.workers):
        if state.left.pauses and worker.lives and (worker != IDLE or state.rec.session == index):
            rec, left = (
                script.end_sessions(state.rec, (index,), rules.flaw),
                state.left._replace(pauses=state.left.pauses - 1),
            )
            yield (
                Step("reap", call=("reap", index)),
                replace_worker(state, index, worker._replace(lives=False), rec=rec, left=left),
            )


def _generate_redeliveries(state: State, rules: Rules) -> Steps:
    """Generate the steps in which the bus takes a message from its holder.

    The bus finds a dead member at any time, before the end of its session or after it, and may take a living one for
    dead. No promise depends on how the bus knows that a member lives: by the worker's session on Redis Streams, by a
    session of its own on Kafka.
    """
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


def _stop_worker(state: State, index: int) -> Steps:
    """Stop a worker: it gives back its request, waits for its pending settlement, and leaves the group."""
    worker, left = state.workers[index], state.left._replace(stops=state.left.stops - 1)
    if worker.run is not None and worker.run.phase == "finish":
        return  # The loop completes the request first.
    out = worker.out if worker.out and worker.out.kind == "job" and not worker.out.end else None
    task, step, after = worker.run or out, Step("stop", index), state
    if task is not None:
        delivered = task.delivery is not None
        step, after = release_request(state, index, task.epoch, failed=False, delivered=delivered)
    yield step._replace(kind="stop"), replace_worker(after, index, worker._replace(run=None, stops=True), left=left)


def release_request(
    state: State, index: int, epoch: int, *, failed: bool, delivered: bool, waits: bool = False
) -> tuple[Step, State]:
    """Give a request back. If it `waits`, nobody may claim it for a while."""
    rec, reply = script.release_request(state.rec, epoch, failed=failed, waits=waits, delivered=delivered)
    return Step("release", index, ("release", epoch, failed, waits, delivered), reply), state._replace(rec=rec)


def _restore_saved_record(state: State) -> State:
    """Return the state after Redis lost everything since the last save.

    Each worker finds its session missing, or older than it should be, and opens another one. Requests that the old
    session seems to hold become free when it ends.
    """
    saved: RequestRecord = state.saved._replace(session=NOBODY if state.saved.session == NOBODY else GHOST)

    def mark_diverged(worker: Worker) -> Worker:
        run = worker.run
        if run is not None and run.tokens > len(saved.tokens):
            worker = worker._replace(run=run._replace(diverged=True))
        return worker if worker == IDLE else worker._replace(lives=False)

    return state._replace(
        rec=saved,
        workers=tuple([mark_diverged(worker) for worker in state.workers]),
        left=state.left._replace(losses=state.left.losses - 1, syncs=0),
        lost=True,
    )
