"""Workers with vLLM and three adapters, which are killed, and whose adapters change under their names.

Adapters are small and random. An answer has to be that of one version of the adapter that was asked for, as
transformers computes it with the adapter added to the weights; one that began in a version that no worker has any more
ends with `answer_interrupted`. All prompts begin alike, so KV of another adapter or version would be found by a name
that tells too little.
"""

import copy
import json
import logging
import random
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from penstock.client.sync import Client
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import AnswerInterrupted, RequestError
from penstock.local.stack import Stack, WorkerSlot
from penstock.messages import EndEvent
from sim.waiting import wait_for

log = logging.getLogger(__name__)

NAMES = ("sql", "chat", "code")
NUM_PROMPTS, NUM_TOKENS, NUM_CLIENTS = 8, 8, 12
START_PATIENCE_S = 900.0
RELOADS, KILLS = 2, 3
ENVIRONMENT = {
    "PENSTOCK_ENGINE_KIND": "vllm", "PENSTOCK_ENGINE_BLOCK_SIZE": "32", "PENSTOCK_ENGINE_POOL_MB": "64",
    "PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu", "PENSTOCK_ENGINE_THREADS": "1",
    "PENSTOCK_ENGINE_MAX_BATCH": "16", "PENSTOCK_WORKER_STALL_LIMIT_S": "600",
}  # fmt: skip


def write_adapter(directory: Path, seed: int, rank: int = 4, **config: Any) -> dict[str, torch.Tensor]:
    """Write a random adapter of the demo model as PEFT does, and return its matrices by their names."""
    chance, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, layer in load_demo().named_modules():
        if isinstance(layer, nn.Linear) and name.startswith("model.layers"):
            a = 0.2 * torch.randn(rank, layer.in_features, generator=chance)
            b = 0.2 * torch.randn(layer.out_features, rank, generator=chance)
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    targets = sorted({name.split(".")[-3] for name in tensors})
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets} | config
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(told))
    return tensors


@cache
def load_demo() -> Any:
    """Return the demo model as transformers computes it."""
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def merge_adapter(tensors: dict[str, torch.Tensor], scaling: float = 2.0) -> Any:
    """Return the demo model with an adapter added to its weights."""
    merged = copy.deepcopy(load_demo())
    for name, layer in merged.named_modules():
        if (a := tensors.get(f"base_model.model.{name}.lora_A.weight")) is not None:
            layer.weight.data += scaling * (tensors[f"base_model.model.{name}.lora_B.weight"] @ a)
    return merged


def generate_greedily(model: Any, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return the likeliest tokens that follow a prompt."""
    ids = torch.tensor([prompt])
    found = model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    return [int(token) for token in found[0, len(prompt) :]]


def draw_prompts(seed: int) -> list[list[int]]:
    """Return prompts of one to four blocks that begin alike."""
    chance = random.Random(seed)
    start = [chance.randrange(10, 900) for _ in range(64)]
    return [start[: 33 + 8 * (number % 4)] + [20 + number] * (1 + 20 * (number // 4)) for number in range(NUM_PROMPTS)]


class Asked(NamedTuple):
    """An answer, or how it ended."""

    name: str
    prompt: int
    first: int
    """The oldest version that may have computed it: the one that all workers had when it was asked for."""
    last: int
    """The newest one that a worker had when it was complete."""
    tokens: list[int]
    error: RequestError | None
    num_cached: int


class AdapterRun:
    """One run: the adapters' versions, the answers, and what is wrong with them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.prompts, self._seed = directory, draw_prompts(seed), seed
        self.complete = self.begun = 0
        """The newest version that all workers have, and the newest that is in the directories."""
        self.answers = list[Asked]()
        self.expected: dict[tuple[str, int], list[list[int]]] = {}
        base = [generate_greedily(load_demo(), prompt) for prompt in self.prompts]
        for version in range(RELOADS + 1):
            self.expected["demo", version] = base
            for number, name in enumerate(NAMES):
                merged = merge_adapter(write_adapter(directory / f"{name}-{version}", self._draw(number, version)))
                self.expected[name, version] = [generate_greedily(merged, prompt) for prompt in self.prompts]

    def _draw(self, number: int, version: int) -> int:
        return 1000 * self._seed + 10 * version + number

    def write_version(self, version: int) -> None:
        """Write a version of all adapters in place of the one before."""
        self.begun = version
        for number, name in enumerate(NAMES):
            write_adapter(self.directory / name, self._draw(number, version))

    def ask_for_answer(self, client: Client, chance: random.Random) -> None:
        """Ask for one answer, and wait for it."""
        name, prompt, first = chance.choice(("demo", *NAMES)), chance.randrange(NUM_PROMPTS), self.complete
        request_id = client.submit(
            token_ids=self.prompts[prompt], model=name, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
        )
        error, tokens, num_cached = None, list[int](), 0
        try:
            for event in client.stream(request_id, timeout_s=START_PATIENCE_S):
                if isinstance(event, EndEvent):
                    num_cached = event.usage.cached_tokens
                else:
                    tokens.append(event.token)
        except RequestError as raised:
            error = raised
        self.answers.append(Asked(name, prompt, first, self.begun, tokens, error, num_cached))

    def find_faults(self) -> list[str]:
        """Return what is wrong with the answers."""
        faults = []
        for one in self.answers:
            right = [self.expected[one.name, version][one.prompt] for version in range(one.first, one.last + 1)]
            if isinstance(one.error, AnswerInterrupted) and one.first < one.last and one.name != "demo":
                right = [tokens[: len(one.tokens)] for tokens in right]
            elif one.error is not None:
                faults.append(f"{one.name}: {one.error.code}: {one.error}")
                continue
            if one.tokens not in right:
                whose = [key for key, found in self.expected.items() if found[one.prompt] == one.tokens]
                faults.append(f"{one.name}, prompt {one.prompt}, versions {one.first} to {one.last}: of {whose}")
        return faults


def play_adapters(seed: int, directory: Path, num_answers: int) -> AdapterRun:
    """Play one run, and return it."""
    run, over = AdapterRun(directory / "adapters", seed), threading.Event()
    distinct = {tuple(map(tuple, found)) for found in run.expected.values()}
    assert len(distinct) == 1 + len(NAMES) * (RELOADS + 1), "two adapters have the same answers"
    run.write_version(0)
    adapters = ",".join(f"{name}={run.directory / name}" for name in NAMES)
    environment = ENVIRONMENT | {"PENSTOCK_ENGINE_ADAPTERS": adapters}
    with Stack(directory / "stack", prefill=1, decode=0, auto=2, environment=environment) as stack:
        stack.wait_until_ready(START_PATIENCE_S)

        def keep_asking(number: int) -> None:
            chance = random.Random(f"{seed} {number}")
            with Client(stack.addresses) as client:
                while not over.is_set():
                    run.ask_for_answer(client, chance)

        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            asking = [clients.submit(keep_asking, number) for number in range(NUM_CLIENTS)]
            try:
                kill_and_reload_workers(run, stack, random.Random(seed), num_answers)
            finally:
                over.set()
            for one in asking:
                one.result()
    count = Counter(one.name for one in run.answers)
    log.info(
        "%s; %d interrupted, %d over a reload, %d tokens of prompts found", dict(count),
        sum(one.error is not None for one in run.answers), sum(one.first < one.last for one in run.answers),
        sum(one.num_cached for one in run.answers),
    )  # fmt: skip
    return run


def kill_and_reload_workers(run: AdapterRun, stack: Stack, chance: random.Random, num_answers: int) -> None:
    """Kill workers and reload all adapters in turns, at even shares of the answers, until there are so many."""
    events = ["kill", "reload"] * RELOADS + ["kill"] * (KILLS - RELOADS)
    for number, event in enumerate(events, 1):
        wait_for_answers(run, num_answers * number // (len(events) + 1))
        if event == "kill":
            worker = chance.choice(stack.workers)
            assert worker.child is not None
            worker.child.kill()
            start_again(stack, worker)
        else:
            run.write_version(run.begun + 1)
            for worker in stack.workers:
                assert worker.child is not None
                worker.child.send_signal(signal.SIGTERM)
                start_again(stack, worker)
            run.complete = run.begun
        log.info("%d answers: %s", len(run.answers), event)
    wait_for_answers(run, num_answers)


def start_again(stack: Stack, worker: WorkerSlot) -> None:
    """Wait until a worker that ends has ended, start it, and wait until it serves."""
    child = worker.child
    assert child is not None
    wait_for(lambda: not child.is_alive(), "the worker ends")
    stack.restart_dead()
    stack.wait_until_ready(START_PATIENCE_S)


def wait_for_answers(run: AdapterRun, number: int) -> None:
    """Wait until there are so many answers, as long as more of them come."""
    while len(run.answers) < number:
        before = len(run.answers)
        wait_for(lambda before=before: len(run.answers) > before, "an answer comes", every_s=0.1)  # type: ignore[misc]
