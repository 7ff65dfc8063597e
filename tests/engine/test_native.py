"""The engine on its native kernels: the same tokens as without them, and the same bits however a request is run."""

import gc
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.kernels import library
from penstock.engine.kernels.norm import NativeNorm
from penstock.engine.kernels.packed import PackedEmbedding, PackedLinear
from penstock.engine.layer import NativeLayer
from penstock.engine.masks import sees_interval
from penstock.engine.model import LoadedModel, load_model
from penstock.engine.sequence import Sequence
from penstock.messages import Sampling
from tests.engine.helpers import generate, handed_over, run, sequence

DTYPES = ["float32", "bfloat16"]
MAX_NEW = 48
SAMPLED = Sampling(temperature=0.9, top_p=0.95)

pytestmark = pytest.mark.skipif(library.load_library() is None, reason="the kernels were not built")


def _fast(dtype: str) -> LoadedModel:
    model = load_model(EngineSettings(dtype=dtype))  # type: ignore[arg-type, unused-ignore]
    accelerate_model(model)
    return model


@pytest.fixture(scope="module", params=DTYPES)
def fast(request: pytest.FixtureRequest) -> LoadedModel:
    return _fast(request.param)


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    native = library.load_library()
    assert native is not None
    native.set_threads(1)


def _prompts() -> list[list[int]]:
    rng = random.Random(3)
    lengths = [1, 5, 16, 31, 64, 100, 3, 47, 200, 12, 90, 33]
    return [[rng.randrange(5, 1000) for _ in range(length)] for length in lengths]


def _sequence(index: int, **given: Any) -> Sequence:
    """Greedy and sampled ones in turns."""
    how: dict[str, Any] = {"sampling": SAMPLED, "seed": index} if index % 2 else {}
    return sequence(_prompts()[index], MAX_NEW, name=f"s{index}", **how, **given)


def _sequences() -> list[Sequence]:
    return [_sequence(index) for index in range(len(_prompts()))]


def _engine(model: LoadedModel, *, threads: int = 1, chunk: int = 256, batch: int = 32) -> Engine:
    return Engine(model, EngineSettings(threads=threads, max_step_tokens=chunk, max_batch=batch, pool_mb=64))


def test_the_demo_model_runs_on_kernels_alone(fast: LoadedModel) -> None:
    kinds = {type(part) for part in fast.module.modules()}
    assert {NativeLayer, NativeNorm, PackedLinear, PackedEmbedding} <= kinds
    assert not kinds & {torch.nn.Linear, torch.nn.Embedding}
    assert len(fast.direct_layers) == fast.config.num_hidden_layers


def test_in_float32_the_tokens_are_those_of_transformers_itself(demo: LoadedModel) -> None:
    outputs = run(_engine(_fast("float32")), [sequence(prompt, 24) for prompt in _prompts()])
    assert outputs == generate(demo, _prompts(), 24)


def test_tokens_do_not_depend_on_how_a_request_is_run(fast: LoadedModel) -> None:
    alone = [run(_engine(fast), [seq])[0] for seq in _sequences()]
    assert sum(map(len, alone)) == MAX_NEW * len(alone)
    for threads, chunk, batch in [(1, 256, 32), (2, 256, 32), (1, 17, 5), (2, 64, 12), (3, 1, 32)]:
        outputs = run(_engine(fast, threads=threads, chunk=chunk, batch=batch), _sequences())
        assert outputs == alone, f"{threads} threads, {chunk} tokens a step, {batch} sequences"


def test_tokens_do_not_depend_on_a_hand_off_or_a_prefix_hit(fast: LoadedModel) -> None:
    first = _engine(fast, chunk=50)
    seqs = _sequences()
    alone = run(first, seqs, remove=False)
    second = _engine(fast, threads=2)
    handed = [handed_over(first, second, seq) for seq in seqs]
    for seq in seqs:
        first.remove_sequence(seq)
    again = _sequences()
    assert run(first, again) == alone
    assert sum(seq.num_cached_tokens for seq in again) > 0
    assert run(second, handed) == alone
    assert all(seq.num_cached_tokens == seq.num_prompt_tokens for seq in handed)


def test_a_resumed_request_goes_on_as_if_nothing_had_happened(fast: LoadedModel) -> None:
    alone = [run(_engine(fast), [seq])[0] for seq in _sequences()]
    for cut in (1, 20, MAX_NEW - 1):
        resumed = [_sequence(index, output_token_ids=output[:cut]) for index, output in enumerate(alone)]
        assert run(_engine(fast, chunk=33), resumed) == alone, f"resumed after {cut} tokens"


@pytest.mark.parametrize("broken", ["norm", "scale"])
def test_a_layer_that_only_looks_like_the_common_one_stays_as_it_is(broken: str) -> None:
    model = load_model(EngineSettings(dtype="float32"))
    layer = model.module.model.layers[2]
    if broken == "norm":
        layer.input_layernorm.forward = lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:])
    else:
        layer.register_forward_hook(lambda module, args, output: output * 1.01)
    accelerate_model(model)
    kinds = [isinstance(part, NativeLayer) for part in model.module.model.layers]
    assert kinds == [True, True, False, True, True, True]


def test_a_layer_that_scales_by_position_is_not_taken_for_the_common_one() -> None:
    model = load_model(EngineSettings(dtype="float32"))
    attention = model.module.model.layers[1].self_attn

    def scaled(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        late = (kwargs["position_ids"] > 500)[..., None]  # in the first part of the context nothing is to be seen
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * torch.where(late, 1.1, 1.0)}

    attention.register_forward_pre_hook(scaled, with_kwargs=True)
    accelerate_model(model)
    kinds = [isinstance(part, NativeLayer) for part in model.module.model.layers]
    assert kinds == [True, False, True, True, True, True]
    assert model.body is None


def test_the_original_weights_are_gone() -> None:
    model = load_model(EngineSettings(dtype="float32"))
    originals = [weakref.ref(part) for part in model.module.modules() if isinstance(part, torch.nn.Linear)]
    accelerate_model(model)
    gc.collect()
    assert originals
    assert not [part for part in originals if part() is not None]


def test_a_library_for_another_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    foreign = tmp_path / "libpenstock.so"
    foreign.write_bytes(b"\x7fELF of some other kind")
    monkeypatch.setattr(library, "LIBRARY", foreign)
    assert library.load_library.__wrapped__() is None


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (lambda query, key: key > query - 5, True),
        (lambda query, key: key // 8 == query // 8, True),
        (lambda query, key: (key > query - 3) | (key == 0), False),
        (lambda query, key: (query - key) % 2 == 0, False),
    ],
)
def test_only_masks_without_gaps_go_to_the_kernel(visible: Any, expected: bool) -> None:
    assert sees_interval(visible) is expected
