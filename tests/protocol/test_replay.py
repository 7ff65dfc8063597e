"""The model's scripts, the real ones and the double of them do the same: random traces."""

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import redis

from penstock.config.settings import RecordSettings
from penstock.names import Pipeline
from penstock.record import Record
from penstock.testing.record import MemoryRecord, MemoryRecords
from sim.protocol import script
from sim.protocol.keepers import LEASE_S, MemoryKeeper, RedisKeeper
from sim.protocol.model import describe_step
from sim.protocol.promises import is_over
from sim.protocol.replay import Replay
from sim.protocol.script import GHOST, LATER, MAX_ATTEMPTS, NEW, NOBODY, End, Message, Reply, RequestRecord
from sim.protocol.state import Budget, Rules, State, Step, make_start_state, stage_of
from sim.protocol.steps import generate_steps
from sim.world.redis_server import RedisServer
from sim.world.runtime import World
from tests.protocol.test_model import KINDS, NOT_REPLAYED

NUM_TRACES, NUM_STEPS = 400, 60
MISHAPS = (
    "crash", "doubt", "fail", "give up", "late", "blind", "reap", "lose", "move", "park", "set aside", "stop",
    "sync", "cancel",
)  # fmt: skip
HOLDERS = ("append", "release", "handed", "finish")
"""Calls with a claim that the worker has, or had."""
SCRIPTS = ("claim", "park", "take", "append", "handed", "release")
ASKED = {kind for kind in KINDS if kind.startswith(SCRIPTS)} | {
    "take: none", "finish: 0", "finish: late", "cancel: 0", "cancel: 1", "reap", "due", "sync", "lose"
}  # fmt: skip
PLENTY = Budget(2, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 2, 1, returns=4)


Start = Callable[[str], Replay]


@pytest.fixture(params=["memory", "world", "redis"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts the replay of a request's life, on a real server, its double, or the server of the simulated world."""
    settings = RecordSettings(lease_s=LEASE_S, retry_cap_s=LEASE_S, max_attempts=MAX_ATTEMPTS)
    if request.param == "memory":
        records = MemoryRecords()
        yield lambda name: Replay(MemoryKeeper(records, name), MemoryRecord(records, settings), name)
        return
    if request.param == "world":
        pipeline, pool = Pipeline("world"), RedisServer(World(0), lambda *_: None).connection_pool("redis://a.redis")
    else:
        url: str = request.getfixturevalue("redis_url")
        pipeline, pool = request.getfixturevalue("pipeline"), redis.ConnectionPool.from_url(url)
    with redis.Redis.from_pool(pool) as client:
        record = Record(client, pipeline, settings)
        yield lambda name: Replay(RedisKeeper(client, pipeline, name), record, name)
        record.close()


def walk_randomly(seed: int) -> Iterator[tuple[State, Step, State]]:
    """Generate a random life of a request, with few mishaps or many, until everything is settled."""
    rng = random.Random(seed)
    left = Budget(*(rng.randint(0, most) for most in PLENTY[:-4]))  # a delay calls no script of its own
    left = left._replace(returns=rng.randint(0, PLENTY.returns))
    state = make_start_state(left, requests=rng.choice([1, 1, 2]), other_body=rng.random() < 0.1)
    stays = rng.choice([(False, False), (True, False), (True, True)])
    rules = Rules(rng.choice([1, 2, 3, 4]), two_steps=rng.random() < 0.5, retries=rng.random() < 0.5, stays=stays)
    for _ in range(NUM_STEPS):
        ways = list(generate_steps(state, rules))
        weights = [0.05 if after is state else 0.3 if step.kind in MISHAPS else 1.0 for step, after in ways]
        step, after = rng.choices(ways, weights)[0]
        yield state, step, after
        if is_over(after, rules) and (rng.random() < 0.5 or not list(generate_steps(after, rules))):
            return
        state = after


def test_the_models_traces_go_the_same_way(start: Start) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_TRACES):
        replay, trace = start(f"r{seed}"), ""
        for before, step, after in walk_randomly(seed):
            trace += f", {describe_step(step)}"
            seen[describe_step(step)] += 1
            try:
                replay.replay_step(step.call, step.reply, before.rec, after.rec)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}{trace}") from error
    assert not KINDS - NOT_REPLAYED - set(seen), sorted(seen.items())


def make_call(
    rng: random.Random, rec: RequestRecord, saved: RequestRecord, clock: int, epochs: list[int], flaw: str = ""
) -> tuple[Step, RequestRecord]:
    """Return any call by any worker, with the expected reply, and the record after it."""
    is_due = rec.not_before_ms or LATER in rec.free
    kinds = ["claim", "park", "take", "cancel", "sync", "lose"] + ["reap"] * (rec.session != NOBODY) + ["due"] * is_due
    if not epochs or rng.random() < 0.3:
        kind = rng.choices(kinds, [6, 2, 3, 0.5, 1, 1, *[3] * (len(kinds) - 6)])[0]
        return _make_first_call(rng, kind, rec, saved, clock, flaw)
    epoch = rng.choice([epochs[-1], rng.choice(epochs)])
    return _make_holder_call(rng, rng.choices(HOLDERS, [8, 3, 2, 1])[0], rec, epoch, flaw)


def _make_first_call(
    rng: random.Random, kind: str, rec: RequestRecord, saved: RequestRecord, clock: int, flaw: str
) -> tuple[Step, RequestRecord]:
    index = rng.randint(0, 3)
    stage = stage_of(index)
    name, job = rng.randint(3, 5), rng.randint(1, 2) * (stage == "decode")
    message = Message(name, job, rng.choice([1, 1, 1, 2]), is_answered=rng.random() < 0.1)
    reply: Reply | int | None = None
    match kind:
        case "claim":
            after, reply = script.claim_request(rec, stage, index, message, clock + 1, flaw)
            return Step(kind, call=(kind, stage, index, message, True), reply=reply), after
        case "park":
            after, reply = script.park_message(rec, stage, message, clock + 1)
            return Step(kind, call=(kind, stage, message), reply=reply), after
        case "take":
            after, reply = script.take_over_request(rec, stage, index, clock + 1)
            return Step(kind, call=(kind, stage, index, True), reply=reply), after
        case "reap":
            return Step(kind, call=(kind, rec.session), reply=reply), script.end_sessions(rec, (rec.session,))
        case "due":
            after = script.pass_waiting_times(rec)
        case "cancel":
            after, reply = script.cancel_request(rec)
        case "sync":
            after = rec
        case _:
            after = saved._replace(session=NOBODY if saved.session == NOBODY else GHOST)
    return Step(kind, call=(kind,), reply=reply), after


def _make_holder_call(
    rng: random.Random, kind: str, rec: RequestRecord, epoch: int, flaw: str
) -> tuple[Step, RequestRecord]:
    position = max(0, len(rec.tokens) + rng.choice([-1, 0, 0, 0, 1]))
    end, (failed, waits, delivered) = End(position, "late"), [rng.random() < 0.5 for _ in range(3)]
    match kind:
        case "append":
            count = rng.choice([1, 1, 2, 3])
            return _step(kind, epoch, position, count, got=script.append_tokens(rec, epoch, position, count, flaw))
        case "finish":
            name = rng.choice([0, 0, 3, 4])
            return _step(kind, epoch, end, name, got=script.finish_request(rec, epoch, end, name, flaw))
        case "release":
            got = script.release_request(rec, epoch, failed=failed, waits=waits, delivered=delivered)
            return _step(kind, epoch, failed, waits, delivered, got=got)
    return _step(kind, epoch, got=script.note_handed_off(rec, epoch))


def _step(kind: str, *args: object, got: tuple[RequestRecord, int]) -> tuple[Step, RequestRecord]:
    return Step(kind, call=(kind, *args), reply=got[1]), got[0]


def replay_calls(replay: Replay, seed: int, flaw: str = "") -> Counter[str]:
    """Make many calls and compare each; return how often each reply came."""
    rng, seen = random.Random(seed), Counter[str]()
    rec, saved, clock = NEW, NEW, 1
    trace, epochs = "", list[int]()
    for _ in range(NUM_STEPS):
        step, after = make_call(rng, rec, saved, clock, epochs, flaw)
        trace += f", {describe_step(step)}"
        seen[describe_step(step)] += 1
        try:
            replay.replay_step(step.call, step.reply, rec, after)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}{trace}") from error
        if isinstance(step.reply, tuple) and step.reply[0] == "claim" and step.reply[1] not in epochs:
            epochs.append(step.reply[1])
        saved = after if step.kind == "sync" else saved
        rec, clock = after, max(clock + 1, after.epoch)
    return seen


def replay_many_calls(start: Start, flaw: str = "") -> Counter[str]:
    seen = Counter[str]()
    for seed in range(NUM_TRACES // 6):
        seen += replay_calls(start(f"r{seed}"), seed, flaw)
    return seen


def test_any_call_by_anybody_is_answered_as_the_model_does(start: Start) -> None:
    seen = replay_many_calls(start)
    assert not ASKED - set(seen), sorted(seen.items())


@pytest.mark.parametrize(
    "flaw", ["no binding", "binding changes", "appends by anybody", "ends uncounted", "ends unbound"]
)
def test_a_model_that_has_other_rules_is_noticed(start: Start, flaw: str) -> None:
    with pytest.raises(AssertionError, match="seed"):
        replay_many_calls(start, flaw)
