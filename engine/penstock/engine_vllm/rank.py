"""The extension of vLLM's worker: each rank of a model has one, in this process or in one of its own.

vLLM mixes the class into its own worker's, whose `model_runner` has the KV. The methods are called by name.
"""

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
            frozenset(tuple(layer.shape[1:]) for layer in layers),
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
        own = torch.from_numpy(parts[_find_rank()])
        for index, layer in enumerate(self.model_runner.kv_caches):
            payloads = own[:, index].view(layer.dtype)
            for number, block in enumerate(blocks):
                layer[block].copy_(payloads[number])

    @torch.inference_mode()
    def penstock_copy_block(self, block: int) -> NDArray[np.uint8]:
        """Return the rank's part of a block: [layers, heads, tokens, bytes]."""
        parts = torch.stack([layer[block] for layer in self.model_runner.kv_caches])
        copied: NDArray[np.uint8] = parts.contiguous().view(torch.uint8).cpu().numpy()
        return copied

    def penstock_begin_sampling(self, draws: "dict[str, SamplingParams]") -> None:
        """Have the rank's next step draw a token for each of these requests of vLLM."""
        step_sampling.begin(draws)

    def penstock_take_drawn(self) -> "dict[str, tuple[int, Logprobs | None] | None]":
        """Return what the rank's step has drawn: nothing where it does not compute logits, None for broken ones."""
        return step_sampling.drawn


def _find_rank() -> int:
    from vllm.distributed.parallel_state import get_world_group

    rank: int = get_world_group().rank_in_group
    return rank
