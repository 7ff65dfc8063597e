"""Steps 5 and 9: a job or a result is published and its delivery finished, together or one after the other."""

from sim.protocol import script
from sim.protocol.mishaps import release_request
from sim.protocol.script import End, Message
from sim.protocol.state import (
    FREE,
    POISONOUS,
    PendingOutput,
    Rules,
    Run,
    State,
    Step,
    Steps,
    Worker,
    find_holder,
    replace_worker,
)


def ask_for_hand_off(worker: Worker, rules: Rules, run: Run, end: End | None) -> Worker:
    """Give the hand-off to the settler, which names the job once."""
    if rules.flaw == "prefill settles" and end is not None:
        return ask_for_result(worker, run, end)
    message = run.message._replace(error=run.cause)
    return worker._replace(
        run=None, out=PendingOutput("job", run.epoch, message, run.delivery, end, is_stale=run.is_stale)
    )


def ask_for_result(worker: Worker, run: Run, end: End | None) -> Worker:
    """Give the result to the settler, if the worker has a delivery to settle with it."""
    if run.delivery is None:
        return worker._replace(run=None, out=None)
    out = PendingOutput("result", run.epoch, run.message, run.delivery, end, is_stale=run.is_stale)
    return worker._replace(run=None, out=out)


def settle_output(state: State, rules: Rules, index: int, out: PendingOutput) -> Steps:
    """Generate the steps of a settlement: publish and finish the delivery, then note the hand-off in the record."""
    worker = state.workers[index]
    if out.done is not None:
        yield _note_settled(state, rules, index, out)
        return
    if rules.flaw == "handed before durable" and out.kind == "job" and state.rec.stage == "prefill":
        rec, reply = script.note_handed_off(state.rec, out.epoch)
        if reply:
            yield Step("handed", index, ("handed", out.epoch), reply), state._replace(rec=rec)
            return
    if rules.two_steps and out.kind == "job" and out.delivery is not None and not out.published:
        yield from _publish_job(state, rules, index, out)
        return
    is_stale = out.is_stale and rules.flaw != "settles what came again"
    delivery, mine = (
        out.delivery,
        out.delivery is not None and find_holder(state, out.delivery) == index and not is_stale,
    )
    over = out._replace(done=mine or delivery is None or out.published) if out.kind == "job" else None
    if (
        delivery is not None
        and not mine
        and not (out.kind == "result" and rules.flaw == "settles what it does not hold")
    ):
        yield Step("lost", index), replace_worker(state, index, worker._replace(out=over))
        return
    bus = tuple([one for one in state.bus if one[0] != delivery or not mine])
    kept = (*state.settled, delivery) if state.left.forgets and mine and delivery is not None else state.settled
    settled, out = _publish_output(state._replace(bus=bus, settled=kept), rules, out)
    kind = "hand off alone" if delivery is None else {"job": "hand off"}.get(out.kind, out.kind)
    yield Step(kind, index), replace_worker(settled, index, worker._replace(out=over))
    if state.left.doubts:
        left = state.left._replace(doubts=state.left.doubts - 1)
        if delivery is None and rules.flaw != "publishes again":
            out = out._replace(done=False)
        yield Step("doubt", index), replace_worker(settled, index, worker._replace(out=out), left=left)


def _publish_job(state: State, rules: Rules, index: int, out: PendingOutput) -> Steps:
    """Publish a job before its delivery is finished. If it is unknown whether that succeeded, a new job is made."""
    worker = state.workers[index]
    after, out = _publish_output(state, rules, out)
    yield Step("publish", index), replace_worker(after, index, worker._replace(out=out._replace(published=True)))
    if state.left.doubts:
        left = state.left._replace(doubts=state.left.doubts - 1)
        yield (
            Step("doubt", index),
            replace_worker(after, index, worker._replace(out=out._replace(done=False)), left=left),
        )


def _publish_output(state: State, rules: Rules, out: PendingOutput) -> tuple[State, PendingOutput]:
    name, message = state.next_name, out.message
    if out.published:
        return state, out
    match out.kind:
        case "job":
            out = out._replace(job=out.job or name)
            letters = message.error in POISONOUS
            bus = (*state.bus, (Message(name, out.job, error=message.error), FREE))
        case "retry":
            letters = False
            bus = (*state.bus, (message._replace(name=name, attempt=message.attempt + 1), FREE))
        case "result":
            assert out.end is not None
            letters = out.end.error in POISONOUS and not message.error  # prefill has written the letter of its own end
            return state._replace(results=state.results + 1, letters=state.letters + letters), out
        case _:
            return state, out
    return state._replace(bus=bus, next_name=name + 1, letters=state.letters + letters), out


def _note_settled(state: State, rules: Rules, index: int, out: PendingOutput) -> tuple[Step, State]:
    """Note a durable hand-off in the record; give the request back if the hand-off failed."""
    worker = state.workers[index]._replace(out=None)
    if out.done:
        rec, reply = script.note_handed_off(state.rec, out.epoch)
        return Step("handed", index, ("handed", out.epoch), reply), replace_worker(state, index, worker, rec=rec)
    if rules.two_steps and out.delivery is not None and out.delivery not in worker.inbox:
        worker = worker._replace(inbox=(*worker.inbox, out.delivery))  # This worker still has the delivery.
    step, state = release_request(state, index, out.epoch, failed=False, delivered=out.delivery is not None)
    return step, replace_worker(state, index, worker)
