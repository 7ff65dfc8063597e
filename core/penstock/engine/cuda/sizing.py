"""What a GPU has room for: how many sequences, tokens a step, and KV blocks, where the settings leave that open."""

import logging
from typing import Protocol

import torch

from penstock.config.settings import EngineSettings
from penstock.engine.model import LoadedModel
from penstock.engine.sampler import SamplingParams, sample_tokens
from penstock.engine.sequence import Sequence
from penstock.engine.step_batch import StepBatch
from penstock.errors import ModelLoadError
from penstock.messages import Sampling

log = logging.getLogger(__name__)

MAX_BATCH, MAX_STEP_TOKENS = 256, 2048
"""The defaults on a GPU: its matrix products are at full speed with some hundreds of rows."""
RESERVED_BYTES = 2 * 2**30
"""Memory for recorded steps, for the libraries' own, and for what is between tensors."""


class DeviceMemory(Protocol):
    """The memory of a device."""

    def count_free_bytes(self) -> int:
        """Return how much is free, after what this process keeps without using it was given back."""

    def count_total_bytes(self) -> int:
        """Return how much the device has."""

    def count_own_bytes(self) -> int:
        """Return how much the tensors of this process take."""

    def reset_peak(self) -> None:
        """Begin to look for the peak anew."""

    def count_peak_bytes(self) -> int:
        """Return how much the tensors of this process took at most since `reset_peak`."""


class CudaMemory:
    """A GPU's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def count_free_bytes(self) -> int:
        """Return how much is free, after what this process keeps without using it was given back."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def count_total_bytes(self) -> int:
        """Return how much the GPU has."""
        return torch.cuda.mem_get_info(self._device)[1]

    def count_own_bytes(self) -> int:
        """Return how much the tensors of this process take."""
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Begin to look for the peak anew."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def count_peak_bytes(self) -> int:
        """Return how much the tensors of this process took at most since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)


def size_for_device(model: LoadedModel, settings: EngineSettings) -> EngineSettings:
    """Return the settings with what suits the model's device where the settings do not say it."""
    if model.device.type != "cuda":
        return settings
    settings = choose_batch(settings)
    if "pool_mb" not in settings.model_fields_set:
        settings = size_pool(model, settings, CudaMemory(model.device))
    log.info(
        "%s: %d MiB of KV blocks, %d sequences and %d tokens a step",
        torch.cuda.get_device_name(model.device), settings.pool_mb, settings.max_batch, settings.max_step_tokens,
    )  # fmt: skip
    return settings


def choose_batch(settings: EngineSettings) -> EngineSettings:
    """Return the settings with a GPU's defaults for the sequences and the tokens of a step."""
    given = settings.model_fields_set
    max_step_tokens = settings.max_step_tokens if "max_step_tokens" in given else MAX_STEP_TOKENS
    max_batch = settings.max_batch if "max_batch" in given else min(MAX_BATCH, max_step_tokens)
    return settings.model_copy(update={"max_batch": max_batch, "max_step_tokens": max(max_step_tokens, max_batch)})


def size_pool(model: LoadedModel, settings: EngineSettings, memory: DeviceMemory) -> EngineSettings:
    """Return the settings with a pool for all that the largest steps leave of this worker's share of the memory.

    Raises `ModelLoadError` if that is too little for one block.
    """
    weights = memory.count_own_bytes()
    memory.reset_peak()
    run_largest_steps(model, settings)
    step = memory.count_peak_bytes() - weights
    share = int(memory.count_total_bytes() * settings.gpu_share) - weights
    pool = min(share, memory.count_free_bytes()) - step - RESERVED_BYTES
    if pool < model.layout.block_bytes:
        raise ModelLoadError(
            f"the GPU has no room for KV blocks: of {settings.gpu_share:.0%} of its memory "
            f"(PENSTOCK_ENGINE_GPU_SHARE) the weights take {weights / 2**20:,.0f} MiB, and a step of "
            f"{settings.max_step_tokens} tokens (PENSTOCK_ENGINE_MAX_STEP_TOKENS) {step / 2**20:,.0f} MiB"
        )
    return settings.model_copy(update={"pool_mb": max(1, pool // 2**20)})


@torch.inference_mode()
def run_largest_steps(model: LoadedModel, settings: EngineSettings) -> None:
    """Compute and sample a step with as many sequences as there may be, and one with as long a chunk."""
    size = model.layout.block_size
    longest = min(settings.max_step_tokens, model.context_length - 1)
    shared = max(1, min(longest, settings.max_step_tokens // settings.max_batch))
    lengths = [[shared] * settings.max_batch, [longest]]
    num_blocks = max(sum(-(-length // size) for length in step) for step in lengths)
    runner = model.backend.create_runner(model, settings, num_blocks)
    for step in lengths:
        blocks, plan = iter(range(num_blocks)), []
        for number, length in enumerate(step):
            seq = Sequence(f"size-{number}", [0] * length, sampling=Sampling(), seed=0, max_new_tokens=1)
            seq.block_table = [next(blocks) for _ in range(-(-length // size))]
            plan.append((seq, length))
        logits = runner.run_step(StepBatch(plan, size, model.device))[: len(step)]
        sample_tokens(logits, [SamplingParams(Sampling(top_p=0.9), 0, 0)] * len(step))
