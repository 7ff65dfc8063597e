"""What `benchmarks.placement_run` starts and plays: workers whose model sleeps, and traces with texts.

`benchmarks.roles_run` starts such workers, and reads their answers, too.
"""

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import TIMEOUT_S
from benchmarks.systems import DEMO_ENVIRONMENT, make_logits
from penstock.client.aio import AsyncClient
from penstock.engine.engine import Engine
from penstock.engine.scheduling.cost import StepCost
from penstock.engine.weights.files import DEMO_MODEL
from penstock.local.processes import Child
from penstock.local.stack import Stack, WorkerSlot
from penstock.messages import EndEvent, TokenEvent
from penstock.names import WorkerKind, parse_event_id
from penstock.plan.placing import PlacedRequest
from sim.forked import fork_process
from sim.placement.traces import Segment, make_placed_request

COST = StepCost(fixed_s=0.01, row_s=0.001, context_s=2e-7, chunk_s=0.0, token_s=4e-4)
NUM_WORKERS, BLOCK_TOKENS, MAX_BATCH, MAX_STEP_TOKENS = 4, 16, 32, 256
CONTEXT_TOKENS = 4096
SYSTEM_TOKENS, ANSWER_TOKENS, TURNS = 450, 6, (3, 4)
USER_TOKENS = (100, 200)
STEPS_VARIABLE = "PLACEMENT_RUN_STEPS"
"""The folder in which each worker notes its steps, when they ended, and their seconds; and the requests with tokens
that it computed from their prompt's first token on.
"""
COST_VARIABLE = "PLACEMENT_RUN_COST"
"""The cost of this worker's steps, as JSON, if it is not `COST`."""
ENVIRONMENT = DEMO_ENVIRONMENT | {
    "PENSTOCK_ENGINE_POOL_MB": "192", "PENSTOCK_KV_STORE_SHARED_MB": "0",
    "PENSTOCK_KV_STORE_REDIS_MB": "0", "PENSTOCK_KV_STORE_DISK_MB": "0",
    "PENSTOCK_WORKER_STAY_MAX_PROMPT_TOKENS": "4096",
}  # fmt: skip


class SleepingRunner:
    """Stands for the model: a step takes what it costs, and its tokens are all the same."""

    is_row_exact = False

    def __init__(self, engine: Engine, token_id: int) -> None:
        self._engine = engine
        self._logits = make_logits(engine, token_id)
        path = Path(os.environ[STEPS_VARIABLE], os.environ["PENSTOCK_WORKER_NAME"])
        self._file = path.with_suffix(".steps").open("a", buffering=1)
        self._again = path.with_suffix(".again").open("a", buffering=1)

    def run_step(self, batch: Any) -> torch.Tensor:
        """Sleep, note the step, and return the rows of logits."""
        cost = self._engine.scheduler.cost
        assert cost is not None
        inside = replace(cost, outside_s=0.0)  # the time outside of steps passes by itself
        seconds = cost.fixed_s + sum(inside.estimate_seconds(seq, num) for seq, num in batch.plan)
        again = [seq.id for seq, _ in batch.plan if seq.num_output_tokens and not seq.num_computed_tokens]
        self._again.writelines(f"{one}\n" for one in again)
        time.sleep(seconds)
        self._file.write(f"{time.time()} {seconds}\n")
        return self._logits.repeat(max(1, batch.num_kept_rows), 1)


def run_sleeping_worker(kind: WorkerKind) -> None:
    """Run a worker whose model sleeps."""
    from penstock.decode_worker.main import run_decode_worker
    from penstock.engine import opening
    from penstock.prefill_worker.main import run_auto_worker, run_prefill_worker

    open_engine = opening.open_engine
    cost = StepCost(**json.loads(os.environ[COST_VARIABLE])) if COST_VARIABLE in os.environ else COST

    def open_sleeping_engine(*given: Any, **options: Any) -> Engine:
        engine = open_engine(*given, **options)
        object.__setattr__(engine.model, "context_length", CONTEXT_TOKENS)
        # So an answer's tokens are those of the next prompt: nothing stands between two turns.
        engine.model.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        engine.use_measured_speed({"tokens_per_s": 1 / cost.token_s, "cost": asdict(cost)})
        token_id, *_ = engine.model.tokenizer.encode(list_words()[0], add_special_tokens=False)
        stand_in: Any = SleepingRunner(engine, token_id)
        engine.runner = stand_in
        engine.speculates = False  # its answers are one word, so each guess would be right
        return engine

    opening.open_engine = open_sleeping_engine
    {"auto": run_auto_worker, "prefill": run_prefill_worker}.get(kind, run_decode_worker)(next_name=True)


class SleepingStack(Stack):
    """Workers whose model sleeps, the last one `slowness` times as long."""

    slowness = 1.0

    def _start_worker(self, worker: WorkerSlot, environment: Mapping[str, str]) -> Child:
        if self.slowness != 1.0 and worker is self.workers[-1]:
            environment = {**environment, COST_VARIABLE: encode_cost(COST, self.slowness)}
        log = self._log_path(worker)
        return fork_process(worker.name, log, run_sleeping_worker, worker.stage, environment=environment)


def stretch_cost(cost: StepCost, factor: float) -> StepCost:
    """Return the cost of steps that take so many times as long."""
    return StepCost(**{name: factor * seconds for name, seconds in asdict(cost).items() if seconds is not None})


def encode_cost(cost: StepCost, factor: float = 1.0) -> str:
    """Return the variable's value for steps that take so many times as long."""
    return json.dumps(asdict(stretch_cost(cost, factor)))


def list_words() -> list[str]:
    """Return words of the demo model's tokenizer: each, with the space before it, is one token."""
    vocabulary = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(" " + one[1:] for one in vocabulary if one[:1] == "Ġ" and len(one) > 3 and one[1:].isalpha())


@dataclass(frozen=True)
class Shape:
    """What a trace is made of."""

    num_chats: int
    length_s: float
    """In this time all chats begin."""
    gap_s: float
    """Seconds between the turns of a chat, about."""
    num_systems: int = 1


@dataclass(frozen=True, eq=False)
class Ask:
    """A request of a trace."""

    placed: PlacedRequest
    segments: tuple[Segment, ...]
    """System prompt, and the user's and the assistant's turns in turn, each with its tokens."""

    @property
    def num_earlier_tokens(self) -> int:
        """Tokens of earlier turns, without the system prompt."""
        return sum(length for _, length in self.segments[1:-1])

    def write_messages(self, run: str, words: Sequence[str]) -> list[dict[str, Any]]:
        """Return the chat; its words are others in each run, as pools still have those of the run before."""
        roles = ["system", *("user", "assistant") * (len(self.segments) // 2)]
        messages: list[dict[str, Any]] = []
        for role, (name, length) in zip(roles, self.segments, strict=False):
            drawn = random.Random(f"{run} {name}").choices(words, k=length)
            # All answers are one word again and again.
            text = words[0] * length if role == "assistant" else "".join(drawn)
            messages.append({"role": role, "content": text})
        return messages


@dataclass
class Answered:
    """The outcome of a request of a run. Times are seconds since the run began."""

    request: PlacedRequest
    at_s: float
    token_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    is_broken: bool = True
    """Whether it has not ended, or not with all its tokens, each at its place."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.token_s[0] - self.at_s

    @property
    def itl_s(self) -> float:
        """Mean seconds between two tokens; 0 for a single one."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)

    @property
    def num_tokens(self) -> int:
        """The tokens of prompt and answer."""
        return self.request.prompt_tokens + self.request.output_tokens

    async def read_answer(
        self, client: AsyncClient, request_id: str, begun_s: float, note_first: Callable[[], None] = lambda: None
    ) -> None:
        """Read the answer of a request in a run that began at a time of the monotonic clock."""
        positions = list[int]()
        async for event in client.stream(request_id, timeout_s=TIMEOUT_S):
            if isinstance(event, TokenEvent):
                if not self.token_s:
                    note_first()
                self.token_s.append(time.monotonic() - begun_s)
                positions.append(parse_event_id(event.id)[0])
            elif isinstance(event, EndEvent):
                self.cached_tokens = event.usage.cached_tokens
                self.is_broken = event.error is not None or positions != list(range(self.request.output_tokens))
                num_prompt = event.usage.prompt_tokens
                assert self.is_broken or num_prompt == self.request.prompt_tokens, "prompts are those of the trace"


def make_trace(shape: Shape) -> list[Ask]:
    """Return the requests of a trace by time, the same ones each time."""
    found: list[Ask] = []
    weights = list(accumulate((number + 1) ** -1.1 for number in range(shape.num_systems)))
    for number in range(shape.num_chats):
        rng, name = random.Random(f"chat {number}"), f"chat-{number}"
        at_s = rng.uniform(0.0, shape.length_s)
        (system,) = rng.choices(range(shape.num_systems), cum_weights=weights)
        segments: list[Segment] = [(f"system {system}", SYSTEM_TOKENS)]
        for turn in range(rng.choice(TURNS)):
            segments.append((f"user {name}.{turn}", rng.randint(*USER_TOKENS)))
            answer = (f"answer {name}.{turn}", ANSWER_TOKENS)
            placed = make_placed_request(f"{name}.{turn}", at_s, segments, answer, None, name, BLOCK_TOKENS)
            found.append(Ask(placed, tuple(segments)))
            segments.append(answer)
            at_s += shape.gap_s * rng.uniform(0.5, 1.5)
    return sorted(found, key=lambda ask: ask.placed.at_s)
