"""What a GPU does, on a CPU: kernels, recorded work and a second queue, as strict as theirs or stricter."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.config.settings import EngineSettings
from penstock.engine.cuda import trial, varlen
from penstock.engine.cuda.backend import CudaBackend, CudaRunner
from penstock.engine.cuda.decode import Recorder
from penstock.engine.engine import Engine
from penstock.engine.model import LoadedModel
from penstock.engine.storage import KVStorage

TRIAL_BLOCKS = 2000


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """torch's, over a paged pool, in plain operations and in any dtype. Rows that belong to no sequence are NaN."""
    num, (left, right) = len(seqused_k), window_size
    for x, shape in ((cu_seq_q, (num + 1,)), (cu_seq_k, (num + 1,)), (seqused_k, (num,)), (block_table[:, 0], (num,))):
        assert (x.dtype, x.shape) == (torch.int32, shape)
    assert all(x.is_contiguous() for x in (cu_seq_q, seqused_k, block_table))
    assert query.stride(2) == key.stride(3) == value.stride(3) == 1
    assert max_k == block_table.shape[1] * key.shape[1]
    assert scale > 0
    assert right in (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert max_q > 1 or len(query) == num
    rows = torch.arange(len(query))
    seq = (rows[:, None] >= cu_seq_q[1:]).sum(1)
    is_nobodys, seq = seq == num, seq.clamp(max=num - 1)
    position = (seqused_k[seq] - (cu_seq_q[seq + 1] - rows))[:, None]
    at = torch.arange(max_k)[None]
    seen = at < seqused_k[seq][:, None]
    if right == 0:
        seen &= at <= position
    if left >= 0:
        seen &= at >= position - left
    repeats = query.shape[1] // key.shape[2]
    k, v = (x[block_table].flatten(1, 2)[seq].repeat_interleave(repeats, 2) for x in (key, value))
    scores = torch.einsum("thd,tlhd->thl", query, k) * scale
    shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("thl,tlhd->thd", shares, v)
    return out.masked_fill(is_nobodys[:, None, None], torch.nan)


def model_on(monkeypatch: pytest.MonkeyPatch, model: LoadedModel, kernel: Callable[..., Tensor]) -> LoadedModel:
    """The model as it would be loaded where `kernel` is torch's `varlen_attn`, and takes the model's dtype."""
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(trial, "DTYPES", (model.dtype,))
    monkeypatch.setattr(trial, "MAX_TRIAL_TOKENS", 128)
    monkeypatch.setattr(trial, "TRIAL_POOL_BYTES", TRIAL_BLOCKS * model.layout.block_bytes)
    return replace(model, backend=EmulatedBackend(trial.find_varlen_windows(model)))


@dataclass(frozen=True)
class EmulatedBackend(CudaBackend):
    """A GPU's backend in a CPU's memory. Without a recorder, it records no decode steps."""

    recorder: Recorder | None = None

    def create_runner(
        self, model: LoadedModel, settings: EngineSettings, num_blocks: int, num_states: int = 1
    ) -> CudaRunner:
        storage = KVStorage(model.layout, num_blocks + 1, model.device)
        graphs = self.create_graphs(model, settings, storage, self.recorder) if self.recorder else None
        return CudaRunner(model.module, storage, self.windows, graphs)


_WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default}


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation, with the tensors it read and made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **kwargs or {})
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """All of it again, on the same tensors and into the same tensors."""
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            if isinstance(out, Tensor) and out.data_ptr() != again.data_ptr():
                out.copy_(again)


class TapeRecorder:
    """Records on a tape. What is recorded has been run once, as there is no other way on a CPU."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def record_graph(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with Tape() as tape:
            result = work()
        self.num_recorded += 1

        def replay() -> Tensor:
            self.num_replayed += 1
            result.fill_(torch.nan)
            tape.replay()
            return result

        return replay

    def record_event(self) -> "Now":
        return Now()


class Now:
    """On a CPU all that was queued is done."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


def recording(model: LoadedModel, settings: EngineSettings) -> tuple[Engine, TapeRecorder]:
    """An engine that records its decode steps, as on a GPU."""
    assert isinstance(model.backend, EmulatedBackend)
    recorder = TapeRecorder()
    engine = Engine(replace(model, backend=replace(model.backend, recorder=recorder)), settings)
    with torch.inference_mode():
        engine.runner.record_steps(lambda done: None)
    recorder.num_replayed = 0
    return engine, recorder


class Queues:
    """A lane and the queue that computes, each run as late as it may be, which is the worst order of the two."""

    def __init__(self) -> None:
        self._lane: list[Callable[[], object]] = []
        self._compute: list[Callable[[], object]] = []
        self._num_done = {id(self._lane): 0, id(self._compute): 0}

    def compute(self, work: Callable[[], object]) -> None:
        self._compute.append(work)

    def finish(self) -> None:
        """Run what is left, computing first."""
        self._run(self._compute, len(self._compute))
        self._run(self._lane, len(self._lane))

    def wait_for_compute(self) -> None:
        upto = len(self._compute)
        self._lane.append(lambda: self._run(self._compute, upto))

    def block_compute(self) -> None:
        upto = len(self._lane)
        self._compute.append(lambda: self._run(self._lane, upto))

    def enqueue_copy(self, target: Tensor, source: Tensor) -> "Until":
        self._lane.append(lambda: target.copy_(source))
        upto = len(self._lane)
        return Until(lambda: self._run(self._lane, upto))

    def _run(self, queue: list[Callable[[], object]], upto: int) -> None:
        while self._num_done[id(queue)] < upto:
            work = queue[self._num_done[id(queue)]]
            self._num_done[id(queue)] += 1
            work()


class AtOnce:
    """A lane that copies at once, as all that computes is done on a CPU."""

    def wait_for_compute(self) -> None:
        """It is done."""

    def block_compute(self) -> None:
        """The copies are done."""

    def enqueue_copy(self, target: Tensor, source: Tensor) -> Now:
        target.copy_(source)
        return Now()


class Until:
    """A place in a queue."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.synchronize = run
