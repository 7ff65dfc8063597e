"""The miniature keeps its promises after a mishap at each step, and breaks them where one of its rules is left out."""

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from examples import miniature
from examples.miniature import REQUESTS, Bus, Pipeline
from penstock.testing import transitions
from tests.draws import mark_some

ANSWERS = sorted(Pipeline().run({}).bus.results)


def play(mishaps: dict[int, str], seed: int = 0, *, loses_kv: bool = False) -> Counter[str]:
    """Check a run with mishaps: each request has one result, that of an undisturbed run. Return what was counted."""
    pipeline = Pipeline(seed).run(mishaps, loses_kv=loses_kv)
    assert sorted(pipeline.bus.results) == ANSWERS, (mishaps, seed)
    for name, tokens in ANSWERS:
        assert len(pipeline.seen[name]) == len(tokens)
    return pipeline.counts


@pytest.mark.parametrize("seed", mark_some(range(3), pytest.mark.proof))
def test_a_mishap_at_each_step_leaves_one_result_with_the_same_tokens(seed: int) -> None:
    assert [name for name, _ in ANSWERS] == [request.id for request in REQUESTS]
    assert [len(tokens) for _, tokens in ANSWERS] == [request.max_tokens for request in REQUESTS]
    counts: Counter[str] = Counter()
    for step in range(len(Pipeline(seed).run({}).steps)):
        for mishap in ("kill", "pause"):
            counts += play({step: mishap}, seed, loses_kv=step % 2 == 0)
    assert min(counts[what] for what in ("taken over", "stale messages", "tokens refused")) > 0


def test_many_mishaps_leave_one_result_with_the_same_tokens() -> None:
    for seed in range(100):
        drawn = random.Random(seed)
        play({drawn.randrange(300): drawn.choice(["kill", "pause"]) for _ in range(20)}, seed, loses_kv=True)


def settle_whatever_is_held(bus: Bus, delivery: miniature.Delivery, *results: tuple[str, tuple[int, ...]]) -> bool:
    """Settle a delivery though the bus gave it to another member."""
    bus.results += results
    bus.finished.add(delivery.name)
    bus.held.pop(delivery.name, None)
    return True


def bind_each_message(rec: miniature.Record, *args: object) -> tuple[miniature.Record, transitions.ClaimReply]:
    """Claim a request as if no other message were bound to it."""
    bound = rec._replace(bound=None, stage="decode") if rec.stage == "end" else rec._replace(bound=None)
    return claim_request(bound, *args)


def append_without_a_fence(rec: miniature.Record, _: int, position: int, tokens: tuple[int, ...]) -> object:
    """Append tokens of any epoch at the end of the log, whatever their position."""
    return append_tokens(rec, rec.epoch, len(rec.tokens), tokens)


claim_request: Callable[..., tuple[miniature.Record, transitions.ClaimReply]] = transitions.claim_request
append_tokens = transitions.append_tokens


@pytest.mark.parametrize(
    ("place", "name", "flaw"),
    [
        (Bus, "settle", settle_whatever_is_held),
        (transitions, "claim_request", bind_each_message),
        (transitions, "append_tokens", append_without_a_fence),
    ],
)
def test_without_its_rule_a_promise_breaks(
    place: object, name: str, flaw: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, flaw)
    with pytest.raises(AssertionError):
        test_many_mishaps_leave_one_result_with_the_same_tokens()


def test_it_runs_by_itself() -> None:
    done = subprocess.run([sys.executable, miniature.__file__], capture_output=True, text=True, check=True)
    assert "kill after" in done.stdout
    assert "OTHER" not in done.stdout


def test_it_is_short_and_loads_no_model_library() -> None:
    assert len(Path(miniature.__file__).read_text("utf-8").splitlines()) <= 300
    code = "import sys, miniature; print({'torch', 'transformers', 'confluent_kafka'} & set(sys.modules))"
    folder = Path(miniature.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
