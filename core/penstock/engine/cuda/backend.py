"""A GPU as a model's backend: paged attention where `varlen_attn` has it, recorded decode steps, pinned copies."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.config.settings import EngineSettings
from penstock.engine.cuda.copies import BlockCopier, BlockDownload, Landing
from penstock.engine.cuda.decode import CudaRecorder, DecodeGraphs, Recorder
from penstock.engine.cuda.varlen import VarlenStep, Windows, make_calls
from penstock.engine.model import LoadedModel
from penstock.engine.runner import ModelRunner
from penstock.engine.sequence import Payload, Sequence
from penstock.engine.step import Step
from penstock.engine.step_batch import StepBatch
from penstock.engine.storage import BlockCopy, BlockLayout, KVStorage


class CudaStorage(KVStorage):
    """Blocks in a GPU's memory, which are copied from and to host memory."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device, copier: BlockCopier) -> None:
        super().__init__(layout, num_blocks, device)
        self._copier = copier

    def write_block(self, block: int, payload: Payload) -> None:
        """Fill a block from `block_bytes` bytes."""
        self._copier.write_block(self.data[block], payload)

    def must_wait_for_views(self, num_blocks: int) -> bool:
        """Return whether there will be memory for so many views only when others are committed."""
        return num_blocks > self._copier.num_free_uploads

    def allocate_views(self, blocks: list[int]) -> tuple[list[memoryview], Landing | None]:
        """Return a writable view of host memory for each block, and the rows they are part of."""
        landing = self._copier.begin_upload(len(blocks))
        return [memoryview(row.view(torch.uint8).numpy()) for row in landing.rows], landing  # type: ignore[arg-type, unused-ignore]

    def commit_views(self, blocks: list[int], staged: Landing | None) -> None:
        """Copy what was written to the first views to these blocks, before the next step."""
        assert staged is not None
        self._copier.finish_upload([self.data[block] for block in blocks], staged)

    def view_block(self, block: int) -> memoryview | None:
        """Return None: the block's own bytes are not in host memory."""
        return None

    def begin_copy(self, block: int, num_rows: int) -> BlockCopy:
        """Begin to copy a block to host memory. It may not be written before the copy is released."""
        download = self._copier.begin_download(self.data[block])
        return BlockCopy(partial(self._read_download, download, num_rows), download.release)

    def _read_download(self, download: BlockDownload, num_rows: int) -> memoryview:
        content = download.wait_for_content()
        self.zero_rows(content, num_rows)
        return memoryview(content.view(torch.uint8).numpy()).toreadonly()  # type: ignore[arg-type, unused-ignore]


class CudaRunner(ModelRunner):
    """Computes steps on a GPU: `varlen_attn` where a layer has a window in `windows`, torch elsewhere."""

    is_asynchronous = True

    def __init__(self, module: Any, storage: KVStorage, windows: Windows, graphs: DecodeGraphs | None) -> None:
        super().__init__(module, storage)
        self._windows = windows
        self._refused: set[tuple[int, ...]] = set()
        """Sizes of steps that `varlen_attn` does not compute."""
        self.graphs = graphs
        """Runs the steps in which every sequence decodes; None if not all layers have windows."""

    def run_step(self, batch: StepBatch) -> Tensor:
        """Write the KV of the batch to the pool, and return the logits of the sampled sequences' last tokens."""
        if batch.partial_new_blocks:
            # Whole blocks are read behind a mask, which does not hide what is no number.
            self.storage.zero_blocks(batch.partial_new_blocks)
        if self.graphs is not None and self.graphs.can_run(batch.plan):
            return self.graphs.run_step([seq for seq, _ in batch.plan])
        if not self._windows:
            return self.compute_sampled_logits(Step(batch, self.storage))
        calls = make_calls(batch.plan, batch.block_size, batch.device)
        return self.compute_sampled_logits(VarlenStep(batch, self.storage, self._windows, calls, self._refused))

    def record_steps(self, report: Callable[[float], None]) -> None:
        """Record decode steps. `report` gets the share that is done."""
        if self.graphs is not None:
            self.graphs.record_steps(self.compute_logits, report)

    def prepare_next_step(self, seqs: list[Sequence]) -> None:
        """Write the inputs of the next decode step that are known while this step's tokens are sampled."""
        if self.graphs is not None:
            self.graphs.prepare_next_step(seqs)


def describe_device(device: torch.device) -> str:
    """Return the model of a GPU, its size, and the versions of what computes on it."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call, unused-ignore]
    gpu = torch.cuda.get_device_properties(device)  # type: ignore[no-untyped-call, unused-ignore]
    return (
        f"{gpu.name} {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, cuDNN {cudnn}"
    )


@dataclass(frozen=True)
class CudaBackend:
    """A GPU. Without windows its attention is torch's."""

    windows: Windows = field(default_factory=dict)
    """The layers whose attention `varlen_attn` computes."""
    device_name: str = ""
    """What the GPU is, and the versions of its libraries, by `describe_device`: all that rounding depends on."""

    num_fused: int = 0
    """Parts of the model that are computed by fewer operations."""

    @property
    def name(self) -> str:
        """Its name in the fingerprint."""
        return f"cuda {sorted(self.windows)} {self.num_fused} {self.device_name}"

    def create_runner(
        self, model: LoadedModel, settings: EngineSettings, num_blocks: int, num_states: int = 1
    ) -> ModelRunner:
        """Return a runner of the model over a new pool of KV blocks. `num_states` has no meaning: `probe` refuses."""
        torch.set_num_threads(settings.threads)
        copier = BlockCopier.create(model.device, model.layout.block_elements, model.layout.dtype, num_blocks)
        # One more block: the padding rows of a recorded step write to it.
        storage = CudaStorage(model.layout, num_blocks + 1, model.device, copier)
        graphs = self.create_graphs(model, settings, storage, CudaRecorder(model.device))
        return CudaRunner(model.module, storage, self.windows, graphs)

    def create_graphs(
        self, model: LoadedModel, settings: EngineSettings, storage: KVStorage, recorder: Recorder
    ) -> DecodeGraphs | None:
        """Return graphs that write padding to the storage's last block; None if a layer has no window."""
        if self.windows.keys() != storage.keys.keys():
            return None
        spare = len(storage.data) - 1
        return DecodeGraphs(
            storage,
            self.windows,
            max_batch=settings.max_batch,
            max_blocks=min(spare, -(-model.context_length // settings.block_size)),
            spare=spare,
            recorder=recorder,
        )
