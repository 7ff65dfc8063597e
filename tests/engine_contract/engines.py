"""The engines that the contract's tests run against, and a caller that does with one what a worker's loop does."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config.settings import KVSettings
from penstock.engine.contract import EngineEvent, InferenceEngine, SampledToken
from penstock.engine.engine import Engine
from penstock.engine.loading.loading import load_model
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.sequence import Sequence as EngineSequence
from penstock.engine.serving import ServingEngine
from penstock.errors import RequestError, SequenceFailed
from penstock.kvstore.store import KVStore, StoreLayout
from penstock.messages import Sampling
from sim.waiting import wait_for
from sim.workload import ENGINE_SETTINGS

if TYPE_CHECKING:
    from penstock.engine_vllm.core import VllmCore

TENANT = "contract"
BLOCK = 32
"""A block size that every engine has."""


@cache
def _load_model() -> LoadedModel:
    return accelerate_model(load_model(ENGINE_SETTINGS.model_copy(update={"block_size": BLOCK})))


def open_store(core: "Engine | VllmCore", directory: Path) -> KVStore:
    """Open a store in a directory, which other engines may have, too."""
    directory.mkdir(exist_ok=True)
    settings = KVSettings(shared_mb=64, shared_dir=str(directory), redis_mb=0)
    return KVStore.open(StoreLayout.from_model(core.model), settings, "", "contract")


@contextmanager
def serve(core: Engine, directory: Path) -> Iterator[ServingEngine]:
    """Put an engine over a store in a directory."""
    store = open_store(core, directory)
    with closing(store), closing(ServingEngine(core, store)) as engine:
        yield engine


@dataclass
class EngineUnderTest:
    """An engine of the demo model in float32, and what tests do to it that workers do not."""

    engine: InferenceEngine
    store: KVStore
    """Where its blocks go."""
    empty_memory: Callable[[], None]
    """Evicts all blocks from the engine's own memory, as if its process had just been started."""
    count_preemptions: Callable[[], int]


def open_penstock(directory: Path, **settings: Any) -> EngineUnderTest:
    """Open this project's engine over a store in the directory."""
    given = ENGINE_SETTINGS.model_copy(update={"block_size": BLOCK, **settings})
    core = Engine(_load_model(), given)
    store = open_store(core, directory)

    def empty_memory() -> None:
        core.pool.free_blocks(core.pool.allocate_blocks(core.pool.num_free_blocks))

    return EngineUnderTest(ServingEngine(core, store), store, empty_memory, lambda: core.scheduler.num_preemptions)


@cache
def _open_vllm_core(**settings: Any) -> "VllmCore":
    from penstock.engine_vllm.opening import open_vllm_core

    return open_vllm_core(ENGINE_SETTINGS.model_copy(update={"block_size": BLOCK, **settings}))


def open_vllm(directory: Path, **settings: Any) -> EngineUnderTest:
    """Open vLLM over a store in the directory. Its core stays for other tests: opening one takes ten seconds."""
    core = _open_vllm_core(**settings)
    core.drop_cache()
    before = core.num_preemptions
    store = open_store(core, directory)
    return EngineUnderTest(ServingEngine(core, store), store, core.drop_cache, lambda: core.num_preemptions - before)


ENGINES: dict[str, Callable[..., EngineUnderTest]] = {"penstock": open_penstock}
"""By kind: opens an engine over a store in a directory."""
if importlib.util.find_spec("vllm") is not None:
    ENGINES["vllm"] = open_vllm


@dataclass
class Caller:
    """Does with an engine what a worker's loop does, without bus and record."""

    engine: InferenceEngine
    requests: dict[str, EngineSequence] = field(default_factory=dict)
    """Those that are not through."""
    progress: dict[str, EngineSequence] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """All output tokens of each request, those included that it began with."""
    sampled: list[SampledToken] = field(default_factory=list)
    events: list[EngineEvent] = field(default_factory=list)
    stored: "dict[str, Future[float] | None]" = field(default_factory=dict)
    """What `finish_request` returned."""
    failures: dict[str, RequestError] = field(default_factory=dict)

    def add(
        self, name: str, prompt: Sequence[int], sampling: Sampling, said: Sequence[int] = (), **given: Any
    ) -> EngineSequence:
        """Add a request that goes on after the tokens `said`."""
        blocks = self.engine.hash_prompt(TENANT, prompt)
        values: dict[str, Any] = {"seed": sampling.seed or 0, "max_new_tokens": sampling.max_tokens, "blocks": blocks}
        values |= given
        request = EngineSequence(
            name, list(prompt), sampling=sampling, output_token_ids=said, context=name, tenant=TENANT,
            **values,
        )  # fmt: skip
        self.engine.add_request(request)
        self.progress[name] = self.requests[name] = request
        self.tokens[name] = list(said)
        return request

    def add_prompt(self, name: str, prompt: Sequence[int], sampling: Sampling, **given: Any) -> EngineSequence:
        """Add a prompt that is computed for a job of this name, with its first token."""
        return self.add(name, prompt, sampling, max_new_tokens=1, lease_owner=f"job {name}", **given)

    def remove(self, name: str) -> None:
        """Remove a request."""
        self.engine.remove_request(name)
        del self.requests[name]

    def run_once(self) -> None:
        """Run one turn."""
        self.events += self.engine.collect_events()
        if not self.engine.begin_step():
            self.engine.wait_for_event()
            return
        try:
            sampled = self.engine.finish_step()
        except SequenceFailed as failed:
            self.failures[failed.seq.id] = failed.error
            self.remove(failed.seq.id)
            return
        for item in sampled:
            self.take_token(item)
        self.engine.store_full_blocks()

    def take_token(self, item: SampledToken) -> None:
        """Note a token. A request that has all its tokens is finished, and what is behind them dropped."""
        name = item.seq.id
        if (request := self.requests.get(name)) is None:
            return
        self.sampled.append(item)
        self.tokens[name].append(item.token_id)
        if item.is_grammar_ended or len(self.tokens[name]) == request.max_new_tokens:
            self.stored[name] = self.engine.finish_request(name)
            del self.requests[name]

    def run_until(self, condition: Callable[[], object], what: str) -> None:
        """Run turns until the condition holds."""

        def holds() -> bool:
            self.run_once()
            return bool(condition())

        wait_for(holds, what, every_s=0)

    def run_to_end(self) -> dict[str, list[int]]:
        """Run until all requests are through and no block is on its way. Returns their tokens."""
        self.run_until(lambda: not self.requests and not self.engine.is_moving_blocks(), "all are through")
        return self.tokens

    def count_used_blocks(self) -> object:
        """Return how many blocks of the engine's memory are in use."""
        pool = self.engine.report_state()["pool"]
        assert isinstance(pool, dict)
        return pool["used"]
