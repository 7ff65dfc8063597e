"""The steps that may come next: each step of a worker with an effect outside it, and each mishap.

The numbers are those of the life of a request (docs/structure.md). A change to a worker's own memory alone is part of
the step before it.
"""

from typing import Any

from sim.protocol import script
from sim.protocol.mishaps import generate_client_steps, generate_mishaps, release_request
from sim.protocol.script import GHOST, MAX_ATTEMPTS, MAX_RETURNS, End, Message, RequestRecord
from sim.protocol.settling import ask_for_hand_off, ask_for_result, settle_output
from sim.protocol.state import (
    FREE,
    IDLE,
    PendingOutput,
    Rules,
    Run,
    State,
    Step,
    Steps,
    Worker,
    find_holder,
    replace_worker,
    stage_of,
)


def generate_steps(state: State, rules: Rules) -> Steps:
    """Generate every step that may come next, with the state after it."""
    for index in range(4):
        yield from _generate_worker_steps(state, rules, index)
    yield from generate_client_steps(state, rules)
    yield from generate_mishaps(state, rules)


def _generate_worker_steps(state: State, rules: Rules, index: int) -> Steps:
    worker = state.workers[index]
    if not worker.stops:
        yield from _poll_bus(state, index)
        for message in worker.inbox:
            yield from _admit_message(state, rules, index, message)
        yield from _park_messages(state, rules, index)
        yield from _take_over_request(state, rules, index)
        yield from _renew_session(state, index)
        if worker.run is not None:
            yield from (_generate_prefill_steps if index < 2 else _generate_decode_steps)(
                state, rules, index, worker.run
            )
    elif worker.run is None and worker.out is None:
        bus = tuple([(message, FREE if at == index else at) for message, at in state.bus])
        rec = script.end_sessions(state.rec, (index,), rules.flaw)
        yield Step("leave", index, ("reap", index)), replace_worker(state, index, IDLE, bus=bus, rec=rec)
    if worker.out is not None:
        yield from settle_output(state, rules, index, worker.out)


# Steps 1, 2 and 6: polling and claiming.


def _poll_bus(state: State, index: int) -> Steps:
    worker = state.workers[index]
    for place, (message, at) in enumerate(state.bus):
        if at == FREE and (message.job == 0) == (index < 2):
            bus = (*state.bus[:place], (message, index), *state.bus[place + 1 :])
            inbox = (*worker.inbox, message) if message not in worker.inbox else worker.inbox
            run, out = worker.run, worker.out
            if run is not None and run.delivery == message:
                run = run._replace(is_stale=True)
            if out is not None and out.delivery == message:
                out = out._replace(is_stale=True)
            after = worker._replace(inbox=inbox, run=run, out=out)
            yield Step("poll", index), replace_worker(state, index, after, bus=bus)


def _admit_message(state: State, rules: Rules, index: int, message: Message) -> Steps:
    worker, stage = state.workers[index], stage_of(index)
    checks = rules.flaw != "claims what it does not hold"
    if checks and find_holder(state, message) != index:
        rest = worker._replace(inbox=tuple([one for one in worker.inbox if one != message]))
        yield Step("forget", index), replace_worker(state, index, rest)
        if not state.left.delays:
            return
        state = state._replace(left=state.left._replace(delays=state.left.delays - 1))  # the worker learns of it later
    lives = worker.lives or rules.flaw == "claims without a session"
    rec, reply = script.claim_request(state.rec, stage, index, message, state.clock + 1, rules.flaw, lives=lives)
    if worker.out is not None and (reply[0] in ("bound", "conflict") or rec.stage == "end"):
        return  # A worker has one settlement at a time.
    step = Step("claim", index, ("claim", stage, index, message, lives), reply)
    rest = worker._replace(inbox=tuple([one for one in worker.inbox if one != message]))
    match reply[0]:
        case "busy":
            run, settles = worker.run, index >= 2 or rules.stays[index]
            is_mine = run is not None and (run.epoch == rec.epoch or rules.flaw == "attaches to a lost claim")
            needs_it = run is not None and is_mine and (run.delivery is None or run.is_stale)
            if settles and run is not None and needs_it and _are_same_message(run.message, message):
                run = run._replace(message=message, delivery=message, is_stale=False)
                yield step._replace(kind="attach"), replace_worker(state, index, rest._replace(run=run))
            else:
                yield step, state
        case "bound" | "conflict":
            out = PendingOutput("drop", 0, message, message)
            yield (
                step,
                replace_worker(state, index, rest._replace(out=out), letters=state.letters + (reply[0] == "conflict")),
            )
        case _:
            yield step, _begin_run(state, rules, index, rest, (rec, reply, message), message)


def _park_messages(state: State, rules: Rules, index: int) -> Steps:
    """Park waiting messages: those that a worker has no capacity for, and those of a dead member."""
    for message, at in state.bus:
        is_orphan = at == GHOST and rules.flaw != "nobody reads for the dead"
        if (message.job == 0) == (index < 2) and (is_orphan or (at != GHOST and state.left.waits)):
            stage, left = stage_of(index), state.left._replace(waits=state.left.waits - (at != GHOST))
            rec, reply = script.park_message(state.rec, stage, message, state.clock + 1)
            after = state._replace(rec=rec, left=left, clock=max(state.clock + 1, rec.epoch))
            yield Step("park", index, ("park", stage, message), reply), after if rec != state.rec else state


def _take_over_request(state: State, rules: Rules, index: int) -> Steps:
    """Take the request over if it is free."""
    worker, stage = state.workers[index], stage_of(index)
    lives = worker.lives or rules.flaw == "claims without a session"
    rec, reply = script.take_over_request(state.rec, stage, index, state.clock + 1, lives=lives)
    step = Step("take", index, ("take", stage, index, lives), reply)
    if reply[0] == "claim":
        message = rec.message
        assert message is not None
        delivery = message if rules.flaw == "settles what it does not hold" else None
        yield step, _begin_run(state, rules, index, worker, (rec, reply, message), delivery)
    elif reply[0] == "gone":
        yield step, state._replace(rec=rec)


def _begin_run(
    state: State,
    rules: Rules,
    index: int,
    worker: Worker,
    claimed: tuple[RequestRecord, Any, Message],
    delivery: Message | None,
) -> State:
    """Return the state in which the worker runs the claimed request, or ends it."""
    rec, (_, epoch, tokens, ended, cancelled, attempts, *_), message = claimed
    if worker.run is not None:
        worker, delivery = _merge_claims(worker, worker.run, message, delivery, rules)
    cause = message.error
    if not cause and not ended:
        cause = "cancelled" if cancelled else "exhausted" if attempts > MAX_ATTEMPTS else "late" if state.late else ""
    follows = index < 2 and rules.stays[index] and not message.job and (tokens > 0 or attempts > 1)
    run = Run("work" if index < 2 else "wait", epoch, message, delivery, tokens, cause, follows)
    # What has no tokens is computed whole, and its end written, also where it is handed off.
    if not ended and (cause or (tokens == rules.last and (index >= 2 or rules.stays[index] or not rules.last))):
        run = run._replace(phase="finish")
    worker = worker._replace(run=run)
    if ended == 2:
        worker = ask_for_hand_off(worker, rules, run, rec.end)
    elif ended:
        worker = ask_for_result(worker, run, rec.end)
    return replace_worker(state, index, worker, rec=rec, clock=max(state.clock + 1, rec.epoch))


def _merge_claims(
    worker: Worker, older: Run, message: Message, delivery: Message | None, rules: Rules
) -> tuple[Worker, Message | None]:
    """Merge a new claim with a run from before the session was over. One delivery is kept, the other put back."""
    if rules.flaw == "forgets the other delivery" or (delivery is None and _are_same_message(older.message, message)):
        return worker, delivery or older.delivery
    return (worker if older.delivery == delivery else _put_back_delivery(worker, older.delivery)), delivery


def _are_same_message(one: Message, other: Message) -> bool:
    """Return whether two messages are one: the same job, perhaps published twice, or the same request's message."""
    return (one.job, one.job or one.name) == (other.job, other.job or other.name)


def _put_back_delivery(worker: Worker, delivery: Message | None) -> Worker:
    if delivery is None or delivery in worker.inbox:
        return worker
    return worker._replace(inbox=(*worker.inbox, delivery))


def _drop_run(worker: Worker, run: Run) -> Worker:
    """Drop a run whose request another worker holds now."""
    return _put_back_delivery(worker._replace(run=None), run.delivery)


def _renew_session(state: State, index: int) -> Steps:
    """Renew a session. The worker learns that it is over, and opens another one; or that its request is cancelled.

    The loop drops the runs of a session that is over.
    """
    worker, rec = state.workers[index], state.rec
    run, step = worker.run, Step("renew", index, ("renew", index))
    if not worker.lives:
        lost = run and run._replace(lost=True)
        yield step._replace(reply=("lost",)), replace_worker(state, index, worker._replace(run=lost, lives=True))
    if run is None or run.phase not in ("wait", "work"):
        return
    if run.lost:
        yield Step("let go", index), replace_worker(state, index, _drop_run(worker, run))
    elif worker.lives and rec.cancelled and rec.epoch == run.epoch and (index < 2 or run.phase == "wait"):
        ends = worker._replace(run=run._replace(phase="finish", cause="cancelled"))
        yield Step("hear", index), replace_worker(state, index, ends)


# Steps 3, 4, 7 and 8: computing.


def _generate_prefill_steps(state: State, rules: Rules, index: int, run: Run) -> Steps:
    worker = state.workers[index]
    if run.phase == "work":
        yield from _generate_work_ends(state, rules, index, run)
        yield from _set_aside_run(state, rules, index, run)
        most = rules.last if rules.stays[index] else 1
        for count in range(1, most - run.tokens + 1):
            yield _append_tokens(state, rules, index, run, count)
        if run.tokens and worker.out is None:
            yield _leave_prefill(state, rules, index, run, "computed")
    elif run.phase == "ship" and worker.out is None:
        yield _leave_prefill(state, rules, index, run, "written")
    elif run.phase == "finish" and worker.out is None:
        yield from _finish_request(state, rules, index, run)


def _leave_prefill(state: State, rules: Rules, index: int, run: Run, kind: str) -> tuple[Step, State]:
    """Hand a request off. One that decode gave back has a job: any decode worker may take it over again."""
    if run.message.job:
        return _pass_on_request(state, rules, index, run, "pass on")
    return Step(kind, index), replace_worker(state, index, ask_for_hand_off(state.workers[index], rules, run, None))


def _pass_on_request(state: State, rules: Rules, index: int, run: Run, kind: str) -> tuple[Step, State]:
    """Pass a request on to the other stage. Its job's delivery waits where it is, and settles the result later."""
    rec, reply = script.note_handed_off(state.rec, run.epoch, rules.flaw)
    after, bus = _drop_run(state.workers[index], run), state.bus
    if rules.flaw == "settles what it gives back" and reply:
        after, bus = after._replace(inbox=()), tuple([one for one in bus if one != (run.delivery, index)])
    return Step(kind, index, ("handed", run.epoch), reply), replace_worker(state, index, after, rec=rec, bus=bus)


def _give_back_request(state: State, rules: Rules, index: int, run: Run) -> Steps:
    """Give a request back to prefill, where KV inside a picture is lost, but not too often."""
    if not state.left.returns or run.message.error:
        return
    left = state.left._replace(returns=state.left.returns - 1)
    if state.rec.num_returns < MAX_RETURNS:
        step, after = _pass_on_request(state, rules, index, run, "give back")
        yield step, after._replace(left=left)
    else:
        run = run._replace(phase="finish", cause="pictures")
        yield Step("give up", index), replace_worker(state, index, state.workers[index]._replace(run=run), left=left)


def _generate_decode_steps(state: State, rules: Rules, index: int, run: Run) -> Steps:
    worker = state.workers[index]
    if run.phase in ("wait", "work"):
        yield from _generate_work_ends(state, rules, index, run)
        yield from _set_aside_run(state, rules, index, run)
        yield from _give_back_request(state, rules, index, run)
        for count in range(1, rules.last - run.tokens + 1):  # a step of the engine may give several
            yield _append_tokens(state, rules, index, run, count)
        if run.phase == "work" and state.left.preempts:
            left = state.left._replace(preempts=state.left.preempts - 1)
            yield (
                Step("preempt", index),
                replace_worker(state, index, worker._replace(run=run._replace(phase="wait")), left=left),
            )
    elif run.phase == "finish" and worker.out is None:
        yield from _finish_request(state, rules, index, run)


def _generate_work_ends(state: State, rules: Rules, index: int, run: Run) -> Steps:
    """Generate the steps that end a run early: its deadline has passed, or it fails."""
    worker = state.workers[index]
    if state.late:
        yield (
            Step("expire", index),
            replace_worker(state, index, worker._replace(run=run._replace(phase="finish", cause="late"))),
        )
    if state.left.fails and worker.out is None:
        left = state.left._replace(fails=state.left.fails - 1)
        if state.rec.attempts >= rules.fail_attempts:
            run = run._replace(phase="finish", cause="failed")
            yield Step("give up", index), replace_worker(state, index, worker._replace(run=run), left=left)
            return
        delivered = run.delivery is not None
        step, state = release_request(state, index, run.epoch, failed=True, waits=True, delivered=delivered)
        out = PendingOutput("retry", run.epoch, run.message, run.delivery) if run.delivery and rules.retries else None
        after = worker._replace(run=None, out=out) if rules.retries else _drop_run(worker, run)
        yield step._replace(kind="fail"), replace_worker(state, index, after, left=left)


def _set_aside_run(state: State, rules: Rules, index: int, run: Run) -> Steps:
    """Give back a suspect request, because the worker has another one: it computes one suspect at a time."""
    if state.left.asides and not state.late:
        left = state.left._replace(asides=state.left.asides - 1)
        delivered = run.delivery is not None
        step, state = release_request(state, index, run.epoch, failed=False, waits=True, delivered=delivered)
        yield (
            step._replace(kind="set aside"),
            replace_worker(state, index, _drop_run(state.workers[index], run), left=left),
        )


def _append_tokens(state: State, rules: Rules, index: int, run: Run, count: int) -> tuple[Step, State]:
    worker = state.workers[index]
    rec, reply = script.append_tokens(state.rec, run.epoch, run.tokens, count, rules.flaw)
    step = Step("append", index, ("append", run.epoch, run.tokens, count), reply)
    if reply == 0:
        return step, replace_worker(state, index, _drop_run(worker, run))
    if reply == 2:
        run = run._replace(phase="finish", cause="cancelled")
    else:
        tokens = run.tokens + count
        phase = "finish" if tokens == rules.last else "ship" if index < 2 and not rules.stays[index] else "work"
        run = run._replace(phase=phase, tokens=tokens)
    return step, replace_worker(state, index, worker._replace(run=run), rec=rec)


def _finish_request(state: State, rules: Rules, index: int, run: Run) -> Steps:
    worker, end = state.workers[index], End(run.tokens, run.cause)
    # After another claim the request's own message may be settled, and the bus slow to say so: a job is bound instead.
    follows = run.follows and rules.flaw != "binds behind another claim"
    hands_off = index < 2 and (not rules.stays[index] or follows)
    whose = run.message if rules.flaw == "binds without the delivery" else run.delivery
    name = whose.name if whose is not None and index < 2 and not hands_off else 0
    rec, reply = script.finish_request(state.rec, run.epoch, end, name, rules.flaw)
    step = Step("finish", index, ("finish", run.epoch, end, name), reply)
    if reply == 0:
        worker = _drop_run(worker, run)
    else:
        # The worker with the message settles the end: nobody has to hand the request off.
        is_job = hands_off and run.delivery is not None
        worker = ask_for_hand_off(worker, rules, run, end) if is_job else ask_for_result(worker, run, end)
    yield step, replace_worker(state, index, worker, rec=rec)
