"""Models whose layers keep a state: workers are killed while they read a prompt and between tokens of an answer."""

import os
import shutil
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from penstock.bus.contract import Bus, Outgoing
from penstock.config.addresses import Addresses
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.files import DEMO_MODEL
from penstock.engine.loading import load_model
from penstock.engine.tiny import build_tiny_model, shrink_config
from penstock.messages import Request, Sampling, TokenEvent
from penstock.names import Pipeline
from penstock.prefill_worker.handoff import sampling_seed
from penstock.record import Record
from sim.waiting import wait_for
from tests.engine.helpers import run_sequences, sequence
from tests.pipeline.checks import results_of
from tests.pipeline.workers import wait_for_kill, worker_process
from tools.compatibility_cases import KEYWORDS

KILL_EVERY = int(os.environ.get("TEST_KILL_EVERY", "6"))
"""After so many tokens a decode worker is killed."""
NUM_NEW = 20
POINTS = ("decode.7.sent", "decode.7.stepped", "decode.7.confirmed")
LENGTHS = (75, 33, 64)
"""Of the prompts: within a block, right behind one, and at the end of one."""


@pytest.fixture(
    params=["lfm2", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_next", "granitemoehybrid"))]
)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of a tiny random model with the demo model's tokenizer: convolutions, a delta rule, or a scan."""
    auto: Any = AutoModelForCausalLM
    config = shrink_config(CONFIG_MAPPING[request.param](**KEYWORDS.get(request.param, {})))
    config.vocab_size = 1024
    module = build_tiny_model(auto._model_mapping[type(config)], config, 1, torch.device("cpu"))
    made = tmp_path / "model"
    module.save_pretrained(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, made / name)
    return made


def make_work(name: str) -> list[Request]:
    """Return requests of all lengths, greedy and sampled."""
    generator = torch.Generator().manual_seed(5)
    greedy = Sampling(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    sampled = Sampling(max_tokens=NUM_NEW, temperature=0.9, top_p=0.95, seed=3, ignore_eos=True)
    return [
        Request(
            id=f"{name}-{number}",
            token_ids=torch.randint(3, 1024, (length,), generator=generator).tolist(),
            sampling=sampled if number == 1 else greedy,
        )
        for number, length in enumerate(LENGTHS)
    ]


def compute_answers(directory: Path, work: list[Request]) -> dict[str, list[int]]:
    """Return each request's tokens, by an engine that nobody disturbs; greedy ones are those of `generate()`."""
    settings = EngineSettings(model=str(directory), dtype="float32", pool_mb=16)
    auto: Any = AutoModelForCausalLM
    plain = auto.from_pretrained(directory, dtype=torch.float32)
    answers = {}
    for asked in work:
        assert asked.token_ids is not None
        seq = sequence(asked.token_ids, NUM_NEW, sampling=asked.sampling, seed=sampling_seed(asked))
        seq.prompt_key = asked.id.encode()
        (answers[asked.id],) = run_sequences(Engine(load_model(settings), settings), [seq])
        if asked.sampling.temperature == 0:
            prompt = torch.tensor([asked.token_ids])
            said = plain.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_NEW,
                min_new_tokens=NUM_NEW, do_sample=False,
            )  # fmt: skip
            assert answers[asked.id] == said[0, prompt.shape[1] :].tolist()
    return answers


def test_answers_are_those_of_workers_that_live(
    directory: Path, addresses: Addresses, bus: Bus, record: Record, tmp_path: Path
) -> None:
    work = make_work(addresses.pipeline)
    settings = {"ENGINE_MODEL": str(directory), "ENGINE_POOL_MB": "16", "ENGINE_MAX_STEP_TOKENS": "32"}
    with closing(bus.create_publisher()) as publisher:
        topic = Pipeline(addresses.pipeline).request_topic("interactive")
        publisher.publish([Outgoing(topic, one.encode(), one.id) for one in work])
    for order in ("prefill.3.stepped=kill@2", "prefill.4.appended=kill@2"):  # in a prompt, and between two of them
        with worker_process("prefill", addresses, tmp_path, order, settings) as dying:
            wait_for_kill(dying)
    cut_after: set[int] = set()
    with worker_process("prefill", addresses, tmp_path, settings=settings):
        for point in cycle(POINTS):
            with worker_process("decode", addresses, tmp_path, f"{point}=kill@{KILL_EVERY}", settings) as worker:
                wait_for(
                    lambda: not worker.is_alive() or len(results_of(addresses)) == len(work),
                    "the worker is killed, or all answers end",
                    every_s=0.05,
                )
                if worker.is_alive():
                    break
                wait_for_kill(worker)
            cut_after |= {count_tokens(record, one) for one in work}
    expected = compute_answers(directory, work)
    for result in results_of(addresses):
        assert (result.error, result.token_ids, result.finish_reason) == (None, expected[result.id], "length")
    assert len(cut_after - {NUM_NEW}) >= (NUM_NEW - 2 if KILL_EVERY == 1 else 3)


def count_tokens(record: Record, request: Request) -> int:
    """Return how many tokens an answer has."""
    return sum(isinstance(event, TokenEvent) for event in record.read_log(request.id))
