"""vLLM's executor, told that each layer keeps the KV of all tokens: windows and chunks are the ranks' matter alone.

vLLM drops KV that has left the windows of all its layers, or gives layers with windows blocks of their own. A prompt
that goes on elsewhere needs all of it, under one name a block. So vLLM's scheduler sees full attention and one table of
blocks for all layers, and a rank is given the windows again, by layer, for the plan of its attention.
"""

from dataclasses import fields, replace
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from penstock.errors import ModelLoadError


def keep_all_tokens(executor_class: type[Any]) -> type[Any]:
    """Return vLLM's class of executors, with layers that keep the KV of all tokens."""

    class WholeExecutor(executor_class):
        """Has the blocks of all layers in one table."""

        def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
            """Return for each rank what vLLM's scheduler is to know of its layers."""
            block_size = self.vllm_config.cache_config.block_size
            by_rank = [
                {name: _widen_spec(spec, block_size) for name, spec in specs.items()}
                for specs in super().get_kv_cache_specs()
            ]
            self._specs = {
                name: spec for specs in by_rank for name, spec in specs.items() if type(spec) is FullAttentionSpec
            }
            return [{name: _hide_window(spec) for name, spec in specs.items()} for specs in by_rank]

        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            """Tell each rank the windows of its layers. vLLM plans the attention of layers with equal specs together.

            A plan of layers with and without windows together shares a row's keys among threads as if no layer had one.
            By the source of vLLM's kernel for CPUs, a share before a window then counts with the weight of the sink.
            """
            sharing: list[dict[str, str]] = self.collective_rpc("penstock_list_sharing_layers")
            told = []
            for config, targets in zip(kv_cache_configs, sharing, strict=True):
                (group,) = config.kv_cache_groups if len(config.kv_cache_groups) == 1 else [None]
                if group is not None and set(group.layer_names) <= self._specs.keys():
                    names = {name: name for name in group.layer_names} | targets
                    by_layer = {name: self._specs[target] for name, target in names.items()}
                    spec = UniformTypeKVCacheSpecs(block_size=group.kv_cache_spec.block_size, kv_cache_specs=by_layer)
                    config = replace(config, kv_cache_groups=[replace(group, kv_cache_spec=spec)])  # noqa: PLW2901
                told.append(config)
            super().initialize_from_config(told)

    return WholeExecutor


def _widen_spec(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    """Return what describes a layer that keeps the KV of all tokens and computes with the same window or chunks."""
    if type(spec) not in (SlidingWindowSpec, ChunkedLocalAttentionSpec):
        return spec
    chunk = getattr(spec, "attention_chunk_size", block_size)
    if chunk % block_size:
        raise ModelLoadError(
            f"PENSTOCK_ENGINE_BLOCK_SIZE={block_size}: its layers attend within chunks of {chunk} tokens, which vLLM "
            "divides into whole blocks"
        )
    names = {one.name for one in fields(spec) if one.init} & {one.name for one in fields(FullAttentionSpec)}
    return FullAttentionSpec(**{name: getattr(spec, name) for name in names} | {"block_size": block_size})


def _hide_window(spec: KVCacheSpec) -> KVCacheSpec:
    if type(spec) is not FullAttentionSpec:
        return spec
    return replace(spec, sliding_window=None, attention_chunk_size=None)
