"""Workers that differ in one thing, and what one finds of the KV blocks that the other has stored."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from penstock.config.settings import EngineSettings, KVSettings
from penstock.engine.loading.loading import load_stage_models
from penstock.kvstore.block import Block, BlockKey, Span
from penstock.kvstore.store import KVStore, StoreLayout
from penstock.local.valkey import ValkeyServer
from sim.servers import serve_server

PICTURE = Span(4, 8, b"a picture".ljust(32))
TOKENS = st.lists(st.integers(3, 1000), min_size=PICTURE.end, max_size=100)


def edit_config(**values: object) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | values))

    return edit


def flip_weight(directory: Path) -> None:
    weights = bytearray((directory / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (directory / "model.safetensors").write_bytes(weights)


@dataclass(frozen=True)
class Difference:
    """What one of two workers has otherwise, and what both have."""

    both: dict[str, Any] = field(default_factory=dict)
    """Settings."""
    settings: dict[str, Any] = field(default_factory=dict)
    edit: Callable[[Path], None] | None = None
    """Changes the model's directory."""
    patch: tuple[Any, ...] | None = None
    """What differs in the process, as `MonkeyPatch.setattr` takes it."""
    secret: str = ""
    asked: dict[str, Any] = field(default_factory=dict)
    """What a request gives to `hash_prompt`."""


@dataclass
class Workers:
    """Workers with small models of a kind with windows, and a store of each over the same tiers."""

    model: Path
    parent: Path
    url: str
    exits: ExitStack
    _stores: dict[tuple[object, ...], KVStore] = field(default_factory=dict)

    def open_store(self, name: str, difference: Difference, *, differs: bool) -> KVStore:
        """Return the store of the worker that differs, or of the other one."""
        key = (name,) if differs else tuple(difference.both.items())
        if key not in self._stores:
            self._stores[key] = self._open_store(name, difference if differs else Difference(difference.both))
        return self._stores[key]

    def _open_store(self, name: str, difference: Difference) -> KVStore:
        directory = self.model
        if difference.edit is not None:
            directory = Path(shutil.copytree(self.model, self.parent / name))
            difference.edit(directory)
        values = {"model": str(directory), "dtype": "float32", "cache_dir": str(self.parent / "cache")}
        with pytest.MonkeyPatch.context() as patch:
            if difference.patch is not None:
                patch.setattr(*difference.patch)
            layout = _describe_blocks(EngineSettings.model_validate(values | difference.both | difference.settings))
        tiers = KVSettings(
            shared_mb=1, shared_dir=str(self.parent), redis_mb=4, salt_secret=difference.secret or "secret"
        )
        return self.exits.enter_context(closing(KVStore.open(layout, tiers, self.url, "demo")))


def _describe_blocks(settings: EngineSettings) -> StoreLayout:
    """Open what the settings say, and return the layout of its blocks."""
    if settings.kind == "own":
        return StoreLayout.from_model(load_stage_models(settings))
    from penstock.engine_vllm.opening import open_vllm_core

    return StoreLayout.from_model(open_vllm_core(settings).model)


@contextmanager
def open_workers(parent: Path, model: Path) -> Iterator[Workers]:
    """Yield workers with the model in a directory."""
    with ExitStack() as exits:
        server = exits.enter_context(contextmanager(serve_server)(ValkeyServer(parent / "kv", appendonly=False)))
        yield Workers(model, parent, server.url, exits)


def name_blocks(store: KVStore, tokens: list[int], asked: dict[str, Any]) -> list[BlockKey]:
    what = {"tenant": "t", "token_ids": tokens, "spans": (PICTURE,)} | asked
    return store.hash_prompt(**what).prompt_keys()


def store_blocks(store: KVStore, keys: list[BlockKey]) -> None:
    payload = memoryview(bytes(store.layout.payload_bytes))
    for below in (False, True):
        store.store_blocks([(Block(key, payload), 0b11) for key in keys], below=below)


def count_found(store: KVStore, keys: list[BlockKey]) -> int:
    return sum(tier < len(store.tiers) for tier in store.find_tiers([key.hash for key in keys]))


def check_difference(workers: Workers, name: str, difference: Difference, tokens: list[int], writes: bool) -> None:
    """Store a prompt's blocks by the worker that differs, or by the other one: its own are found, no others."""
    stores = {differs: workers.open_store(name, difference, differs=differs) for differs in (True, False)}
    keys = {
        differs: name_blocks(store, tokens, difference.asked if differs else {}) for differs, store in stores.items()
    }
    store_blocks(stores[writes], keys[writes])
    assert count_found(stores[writes], keys[writes]) == len(keys[writes]) > 0
    assert {key.hash for key in keys[True]}.isdisjoint(key.hash for key in keys[False])
    assert count_found(stores[not writes], keys[not writes]) == 0
