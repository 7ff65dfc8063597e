"""The extension of vLLM's worker: each rank of a model has one, in this process or in one of its own.

vLLM mixes the class into its own worker's, whose `model_runner` has the KV. The methods are called by name.
"""

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.engine_vllm.blocks import RankKV
from penstock.engine_vllm.sampler import step_sampling

if TYPE_CHECKING:
    from penstock.engine.sampling.sampler import SamplingParams
    from penstock.messages import Logprobs


class RankExtension:
    """Reads and writes the rank's KV, and hears what its step is to draw."""

    model_runner: Any

    def penstock_describe_kv(self) -> RankKV:
        """Return what the rank has of the KV."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        layers: list[torch.Tensor] = self.model_runner.kv_caches
        return RankKV(
            get_pp_group().rank_in_group,
            get_tp_group().rank_in_group,
            len(layers),
            frozenset(tuple(layer.shape[1:]) if layer.dim() != 3 else (1, *layer.shape[1:]) for layer in layers),
            frozenset(str(layer.dtype).removeprefix("torch.") for layer in layers),
        )

    def penstock_list_sharing_layers(self) -> dict[str, str]:
        """Return the rank's layers that keep no KV, each with the layer whose KV it reads."""
        found: dict[str, str] = self.model_runner.shared_kv_cache_layers
        return found

    def penstock_make_receive_buffer(self) -> None:
        """Make what a later stage of a pipeline receives into. vLLM makes it in a warm-up, which CPUs skip."""
        from vllm.distributed.parallel_state import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", None) is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )

    @torch.inference_mode()
    def penstock_write_blocks(self, blocks: list[int], parts: list[NDArray[np.uint8]]) -> None:
        """Make each part the content of a block. `parts`: by rank, [blocks, layers, heads, tokens, bytes]."""
        views = _view_whole_blocks(self.model_runner.kv_caches)
        own = torch.from_numpy(parts[_find_rank()]).view(views[0].dtype).to(views[0].device)
        start = 0
        for view in views:
            end = start + view.shape[1]
            for block, payload in zip(blocks, own[:, start:end], strict=True):
                view[block].copy_(payload)
            start = end

    @torch.inference_mode()
    def penstock_copy_blocks(self, blocks: list[int]) -> NDArray[np.uint8]:
        """Return the rank's part of blocks: [blocks, layers, heads, tokens, bytes]."""
        views = _view_whole_blocks(self.model_runner.kv_caches)
        at = torch.tensor(blocks, device=views[0].device)
        copied = [view.index_select(0, at) for view in views]
        whole = copied[0] if len(copied) == 1 else torch.cat(copied, 1)
        numbers: NDArray[np.uint8] = whole.cpu().view(torch.uint8).numpy()
        return numbers

    def penstock_begin_sampling(self, draws: "dict[str, SamplingParams]") -> None:
        """Have the rank's next step draw a token for each of these requests of vLLM."""
        step_sampling.begin(draws)

    def penstock_take_drawn(self) -> "dict[str, tuple[int, Logprobs | None] | None]":
        """Return what the rank's step has drawn: nothing where it does not compute logits, None for broken ones."""
        return step_sampling.drawn


def _view_whole_blocks(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the KV of all layers, in order: [blocks, layers, heads, tokens, numbers].

    It is one tensor where each layer begins as far behind the one before it in the same memory, as vLLM has them, so
    that a block is copied at once. Otherwise each layer is one.
    """
    views = [layer.unsqueeze(1) if layer.dim() == 4 else layer[:, None, None] for layer in layers]
    first = views[0]
    steps = {after.storage_offset() - before.storage_offset() for before, after in itertools.pairwise(views)}
    if len(steps) != 1 or min(steps) <= 0 or len({view.untyped_storage().data_ptr() for view in views}) != 1:
        return views
    shape, strides = list(first.shape), list(first.stride())
    shape[1], strides[1] = len(views), int(steps.pop())
    return [first.as_strided(shape, strides)]


def _find_rank() -> int:
    from vllm.distributed.parallel_state import get_world_group

    rank: int = get_world_group().rank_in_group
    return rank
