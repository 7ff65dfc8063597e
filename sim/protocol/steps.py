"""What may happen next: each step of a worker that others could see, and each thing that may go wrong.

The numbers are those of the life of a request (docs/structure.md). What touches a worker's own memory only is part of
the step before it.
"""

from typing import Any

from sim.protocol import script
from sim.protocol.mishaps import mishaps, release, wishes
from sim.protocol.script import GHOST, MAX_ATTEMPTS, End, Message, Rec
from sim.protocol.settling import bring, settle, ship
from sim.protocol.state import FREE, IDLE, Out, Rules, Run, State, Step, Steps, Worker, change, holder, stage_of


def steps(state: State, rules: Rules) -> Steps:
    """Every step that may come next, and the state after it."""
    for index in range(4):
        yield from _worker_steps(state, rules, index)
    yield from wishes(state)
    yield from mishaps(state, rules)


def _worker_steps(state: State, rules: Rules, index: int) -> Steps:
    worker = state.workers[index]
    if not worker.stops:
        yield from _poll(state, index)
        for message in worker.inbox:
            yield from _admit(state, rules, index, message)
        yield from _put_down(state, rules, index)
        yield from _take(state, rules, index)
        yield from _renew(state, index)
        if worker.run is not None:
            yield from (_prefill if index < 2 else _decode)(state, rules, index, worker.run)
    elif worker.run is None and worker.out is None:
        bus = tuple([(message, FREE if at == index else at) for message, at in state.bus])
        rec = script.reap(state.rec, (index,), rules.flaw)
        yield Step("leave", index, ("reap", index)), change(state, index, IDLE, bus=bus, rec=rec)
    if worker.out is not None:
        yield from settle(state, rules, index, worker.out)


# 1, 2, 6: taking in.


def _poll(state: State, index: int) -> Steps:
    worker = state.workers[index]
    for place, (message, at) in enumerate(state.bus):
        if at == FREE and (message.job == 0) == (index < 2):
            bus = (*state.bus[:place], (message, index), *state.bus[place + 1 :])
            inbox = (*worker.inbox, message) if message not in worker.inbox else worker.inbox
            yield Step("poll", index), change(state, index, worker._replace(inbox=inbox), bus=bus)


def _admit(state: State, rules: Rules, index: int, message: Message) -> Steps:
    worker, stage = state.workers[index], stage_of(index)
    checks = rules.flaw != "claims what it does not hold"
    if checks and worker.out is not None and worker.out.delivery == message:
        return  # it is being settled
    if checks and holder(state, message) != index:
        rest = worker._replace(inbox=tuple([one for one in worker.inbox if one != message]))
        yield Step("forget", index), change(state, index, rest)
        return
    lives = worker.lives or rules.flaw == "claims without a session"
    rec, reply = script.claim(state.rec, stage, index, message, state.clock + 1, rules.flaw, lives=lives)
    if worker.out is not None and (reply[0] in ("bound", "conflict") or rec.stage == "end"):
        return  # one settlement at a time
    step = Step("claim", index, ("claim", stage, index, message, lives), reply)
    rest = worker._replace(inbox=tuple([one for one in worker.inbox if one != message]))
    match reply[0]:
        case "busy":
            run = worker.run
            if index >= 2 and run is not None and run.delivery is None and run.message.job == message.job:
                run = run._replace(message=message, delivery=message)
                yield step._replace(kind="attach"), change(state, index, rest._replace(run=run))
            else:
                yield step, state
        case "bound" | "conflict":
            out = Out("drop", 0, message, message)
            yield step, change(state, index, rest._replace(out=out), letters=state.letters + (reply[0] == "conflict"))
        case _:
            yield step, _begin(state, rules, index, rest, (rec, reply, message), message)


def _put_down(state: State, rules: Rules, index: int) -> Steps:
    """Anybody puts down a message that waits: its holder, for want of room, or who reads what a dead member would."""
    for message, at in state.bus:
        is_orphan = at == GHOST and rules.flaw != "nobody reads for the dead"
        if (message.job == 0) == (index < 2) and (is_orphan or (at != GHOST and state.left.waits)):
            stage, left = stage_of(index), state.left._replace(waits=state.left.waits - (at != GHOST))
            rec, reply = script.put_down(state.rec, stage, message, state.clock + 1)
            after = state._replace(rec=rec, left=left, clock=max(state.clock + 1, rec.epoch))
            yield Step("put down", index, ("put down", stage, message), reply), after if rec != state.rec else state


def _take(state: State, rules: Rules, index: int) -> Steps:
    """Go on with what is free for anybody."""
    worker, stage = state.workers[index], stage_of(index)
    lives = worker.lives or rules.flaw == "claims without a session"
    rec, reply = script.take(state.rec, stage, index, state.clock + 1, lives=lives)
    step = Step("take", index, ("take", stage, index, lives), reply)
    if reply[0] == "claim":
        message = rec.message
        assert message is not None
        delivery = message if rules.flaw == "settles what it does not hold" else None
        yield step, _begin(state, rules, index, worker, (rec, reply, message), delivery)
    elif reply[0] == "gone":
        yield step, state._replace(rec=rec)


def _begin(
    state: State, rules: Rules, index: int, worker: Worker, claimed: tuple[Rec, Any, Message], delivery: Message | None
) -> State:
    """Go on with what was claimed, or end it."""
    rec, (_, epoch, tokens, ended, cancelled, attempts), message = claimed
    if worker.run is not None:
        worker, delivery = _merge(worker, worker.run, message, delivery, rules)
    cause = message.error or (
        "cancelled" if cancelled else "exhausted" if attempts > MAX_ATTEMPTS else "late" if state.late else ""
    )
    run = Run("work" if index < 2 else "wait", epoch, message, delivery, tokens, cause)
    if not ended and (cause or (index >= 2 and tokens == rules.last)):
        run = run._replace(pc="finish")
    worker = worker._replace(run=run)
    if ended:
        worker = ship(worker, rules, run, rec.end) if index < 2 else bring(worker, run, rec.end)
    return change(state, index, worker, rec=rec, clock=max(state.clock + 1, rec.epoch))


def _merge(
    worker: Worker, older: Run, message: Message, delivery: Message | None, rules: Rules
) -> tuple[Worker, Message | None]:
    """What was held until its session was over is claimed anew, with one delivery: another one is looked at again."""
    if rules.flaw == "forgets the other delivery" or (delivery is None and older.message.job == message.job):
        return worker, delivery or older.delivery
    return (worker if older.delivery == delivery else _put_back(worker, older.delivery)), delivery


def _put_back(worker: Worker, delivery: Message | None) -> Worker:
    if delivery is None or delivery in worker.inbox:
        return worker
    return worker._replace(inbox=(*worker.inbox, delivery))


def _drop(worker: Worker, run: Run) -> Worker:
    """Another worker holds the request now."""
    return _put_back(worker._replace(run=None), run.delivery)


def _renew(state: State, index: int) -> Steps:
    """A worker renews its session. It hears that it is over, and opens another; or that its request is to end. The loop
    lets go of what was lost.
    """
    worker, rec = state.workers[index], state.rec
    run, step = worker.run, Step("renew", index, ("renew", index))
    if not worker.lives:
        lost = run and run._replace(lost=True)
        yield step._replace(reply=("lost",)), change(state, index, worker._replace(run=lost, lives=True))
    if run is None or run.pc not in ("wait", "work"):
        return
    if run.lost:
        yield Step("let go", index), change(state, index, _drop(worker, run))
    elif worker.lives and rec.cancelled and rec.epoch == run.epoch and (index < 2 or run.pc == "wait"):
        ends = worker._replace(run=run._replace(pc="finish", cause="cancelled"))
        yield Step("hear", index), change(state, index, ends)


# 3, 4, 7, 8: working.


def _prefill(state: State, rules: Rules, index: int, run: Run) -> Steps:
    worker = state.workers[index]
    if run.pc == "work":
        yield from _stopped(state, rules, index, run)
        yield from _set_aside(state, rules, index, run)
        if run.tokens == 0:
            yield from _append(state, rules, index, run)
        elif worker.out is None:
            yield Step("computed", index), change(state, index, ship(worker, rules, run, None))
    elif run.pc == "ship" and worker.out is None:
        yield Step("written", index), change(state, index, ship(worker, rules, run, None))
    elif run.pc == "finish" and worker.out is None:
        yield from _finish(state, rules, index, run)


def _decode(state: State, rules: Rules, index: int, run: Run) -> Steps:
    worker = state.workers[index]
    if run.pc in ("wait", "work"):
        yield from _stopped(state, rules, index, run)
        yield from _set_aside(state, rules, index, run)
        yield from _append(state, rules, index, run)
        if run.pc == "work" and state.left.preempts:
            left = state.left._replace(preempts=state.left.preempts - 1)
            yield Step("preempt", index), change(state, index, worker._replace(run=run._replace(pc="wait")), left=left)
    elif run.pc == "finish" and worker.out is None:
        yield from _finish(state, rules, index, run)


def _stopped(state: State, rules: Rules, index: int, run: Run) -> Steps:
    """The deadline has passed, or the work fails."""
    worker = state.workers[index]
    if state.late:
        yield Step("expire", index), change(state, index, worker._replace(run=run._replace(pc="finish", cause="late")))
    if state.left.fails and worker.out is None:
        left = state.left._replace(fails=state.left.fails - 1)
        if state.rec.attempts >= rules.fail_attempts:
            run = run._replace(pc="finish", cause="failed")
            yield Step("give up", index), change(state, index, worker._replace(run=run), left=left)
            return
        delivered = run.delivery is not None
        step, state = release(state, index, run.epoch, failed=True, waits=True, delivered=delivered)
        out = Out("retry", run.epoch, run.message, run.delivery) if run.delivery and rules.retries else None
        after = worker._replace(run=None, out=out) if rules.retries else _drop(worker, run)
        yield step._replace(kind="fail"), change(state, index, after, left=left)


def _set_aside(state: State, rules: Rules, index: int, run: Run) -> Steps:
    """What may bring its worker down waits while another such request is here."""
    if state.left.asides and not state.late:
        left = state.left._replace(asides=state.left.asides - 1)
        delivered = run.delivery is not None
        step, state = release(state, index, run.epoch, failed=False, waits=True, delivered=delivered)
        yield step._replace(kind="set aside"), change(state, index, _drop(state.workers[index], run), left=left)


def _append(state: State, rules: Rules, index: int, run: Run) -> Steps:
    worker = state.workers[index]
    rec, reply = script.append(state.rec, run.epoch, run.tokens, rules.flaw)
    step = Step("append", index, ("append", run.epoch, run.tokens), reply)
    if reply == 0:
        yield step, change(state, index, _drop(worker, run))
        return
    if reply == 2:
        run = run._replace(pc="finish", cause="cancelled")
    else:
        tokens = run.tokens + 1
        pc = "finish" if tokens == rules.last else "ship" if index < 2 else "work"
        run = run._replace(pc=pc, tokens=tokens)
    yield step, change(state, index, worker._replace(run=run), rec=rec)


def _finish(state: State, rules: Rules, index: int, run: Run) -> Steps:
    worker, end = state.workers[index], End(run.tokens, run.cause)
    rec, reply = script.finish(state.rec, run.epoch, end, rules.flaw)
    step = Step("finish", index, ("finish", run.epoch, end), reply)
    if reply == 0:
        worker = _drop(worker, run)
    else:
        worker = ship(worker, rules, run, end) if index < 2 else bring(worker, run, end)
    yield step, change(state, index, worker, rec=rec)
