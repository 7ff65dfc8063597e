"""A tiny random model of the same architecture as a large one, whose tokens show whether it is computed right.

Its configuration is shrunk: it keeps every kind of layer (type, dense or mixture of experts, shared KV) and the ratio
of the heads, with fewer and narrower layers, and windows that are shorter than a prompt of a few tokens.
"""

import json
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

MAX_PARAMETERS = 20_000_000
"""The largest number of parameters of a tiny model."""
_SPREADS = ((0.2, 1.5), (1.0, 1.0), (3.0, 2.5), (0.2, 4.0), (1.0, 3.0))
"""By seed: the standard deviations of embeddings and of matrices; 1 lets a matrix keep the length of a vector."""

HEAD_SIZE = 16
WINDOW = 8
"""How many tokens a layer with a window or an indexer sees, and how many experts a mixture has."""
MIN_LAYERS = 3
MAX_LAYERS = 12
"""How many layers a tiny model has."""

# transformers' configurations have different names for the same thing. Each list has the names of one.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers",
           "depth")  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
          "num_decoder_attention_heads", "attention_heads")  # fmt: skip
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "emb_dim", "dim", "word_embed_proj_dim")
_FIRST = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
"""Counts: so many layers at the beginning are of another kind."""
_LAST = ("num_kv_shared_layers",)
"""Counts: so many layers at the end are of another kind."""
_INDICES = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "cross_attention_layers", "hybrid_layer_ids",
            "attn_layer_indices")  # fmt: skip
"""Lists of the numbers of layers."""

_MIXER_SIZES = (("mamba_n_heads", "mamba_d_head", "mamba_expand"), ("n_mamba_heads", "mamba_headdim", "mamba_expand"))
"""Numbers of heads, their sizes, and the factor of the hidden size that both make together."""
_DELTA_SIZES = (("linear_num_key_heads", "linear_num_value_heads", 2),
                ("linear_key_head_dim", "linear_value_head_dim", HEAD_SIZE))  # fmt: skip
"""A size of a layer's keys, the same of its values, of which the ratio stays, and the first one's new value."""

_TEXT_TOKENS = ("pad", "bos", "eos", "decoder", "cls", "sep", "mask", "unk", "forced", "eod")
"""How the names of special tokens of texts begin. Other special tokens stand for images and sounds."""
_NO_TOKEN = 10**6
"""A token id that no prompt has."""

_NAMES_BY_MAXIMUM = {
    512: """vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size
        encoder_hash_byte_group_vocab""",
    96: """intermediate_size intermediate_size_mlp ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff ffn_hidden_size
        dense_intermediate_size""",
    64: """embed_dim out_hidden_size""",
    32: """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size q_lora_rank qk_head_dim""",
    HEAD_SIZE: """head_dim swa_head_dim swa_v_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim
        attention_head_dim dim_head d_head kv_channels kv_lora_rank hidden_size_per_layer_input laurel_rank
        query_pre_attn_scalar local_attention mamba_d_state ssm_state_size mamba_head_dim linear_head_dim""",
    WINDOW: """sliding_window sliding_window_size attention_chunk_size window_size attention_window_size
        keep_window_size floor_scale log_scaling_n_floor num_experts n_routed_experts num_local_experts moe_num_experts
        zero_expert_num index_topk mamba_num_heads""",
    2: """index_topk_blocks index_n_heads n_groups num_experts_per_tok num_experts_per_token moe_topk moe_k
        top_k_experts n_group num_expert_group encoder_layers num_encoder_layers""",
    4: """mamba_dt_rank index_block_size linear_num_heads""",
    1: """topk_group mamba_n_groups mamba_ngroups n_shared_experts num_shared_experts moe_num_shared_experts""",
}
_SIZES = {name: cap for cap, names in _NAMES_BY_MAXIMUM.items() for name in names.split()}
"""By name of a size: its maximum in the tiny configuration."""


class CannotShrink(Exception):
    """No small model of this kind can be made; the message says why."""


def shrink_model(module: Any) -> Any:
    """Return the configuration of a tiny model with all kinds of a model's layers. Raises `CannotShrink`.

    All layers are kept where some kinds would be lost, as a configuration names them by periods that do not fit.
    """
    kinds = find_layer_kinds(module)
    for is_cut in (True, False):
        config = shrink_config(module.config, is_cut=is_cut)
        missing = kinds - find_layer_kinds(_build_skeleton(type(module), config))
        if not missing:
            return config
    raise CannotShrink(f"{len(missing)} kinds of layers were lost")


def shrink_config(config: Any, sizes: dict[str, Any] | None = None, *, is_cut: bool = True) -> Any:
    """Return a configuration of the same class for a tiny model. Raises `CannotShrink`.

    `sizes` replaces values of the shrunk configuration. `is_cut`: only the first layer of each kind is kept.
    """
    try:
        return type(config)(**{**_shrink_values(config, is_cut=is_cut), **(sizes or {})})
    except Exception as error:
        raise CannotShrink(f"{type(config).__name__}: {' '.join(str(error).split())[:300]}") from error


def _shrink_values(config: Any, *, is_cut: bool) -> dict[str, Any]:
    """Return the keyword arguments of the shrunk configuration."""
    values: dict[str, Any] = config.to_dict()
    for key in list(values):
        part = config.__dict__.get(key)
        if isinstance(part, PreTrainedConfig):
            values[key] = _shrink_values(part, is_cut=is_cut)
    if is_cut:
        _cut_layers(values)
        # Some configurations say that every so many layers attend, and keep no list of layers that could be cut.
        if isinstance(values.get("attn_layer_offset"), int) and "layers_block_type" not in values:
            values[_find_name(values, _LAYERS) or ""] = values["attn_layer_offset"] + 1
    sizes = {**_SIZES, **_shrink_heads(values)}
    old_head = values.get("head_dim") or _find_head_size(values)
    for overrides in values.get("per_layer_config", {}).values():
        size = _choose_head_size({**values, **overrides})
        overrides.update({key: _cap_value(key, value, sizes) for key, value in overrides.items()})
        if "head_dim" in values:
            overrides["head_dim"] = size
    sizes["head_dim"] = _choose_head_size(values)
    for key, value in list(values.items()):
        values[key] = _cap_value(key, value, sizes)
    if isinstance(values.get("rotary_dim"), int) and old_head:
        values["rotary_dim"] = max(2, values["rotary_dim"] * HEAD_SIZE // old_head)
    _fit_mixers(values)
    for rope in _rope_parameters(values):
        _shrink_rope(rope, old_head)
    values["tie_word_embeddings"] = False
    return values


def _fit_mixers(values: dict[str, Any]) -> None:
    """Let the sizes of layers with a state fit the shrunk hidden size, where a configuration demands that."""
    hidden = values.get(_find_name(values, _HIDDEN) or "")
    for heads, size, expand in _MIXER_SIZES:
        if heads in values and isinstance(values.get(expand), int) and isinstance(hidden, int):
            values[size] = HEAD_SIZE
            values[heads] = values[expand] * hidden // HEAD_SIZE
            if isinstance(values.get("mamba_d_ssm"), int):
                values["mamba_d_ssm"] = values[expand] * hidden
    for keys, of_values, new in _DELTA_SIZES:
        if isinstance(values.get(keys), int) and isinstance(values.get(of_values), int):
            values[keys], values[of_values] = new, new * values[of_values] // values[keys]
    if "attention_head_dim" in values and "attention_hidden_size" in values and isinstance(hidden, int):
        values["attention_hidden_size"] = 2 * hidden
        values["attention_head_dim"] = 2 * hidden // values["num_attention_heads"]


def _find_name(values: dict[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(values.get(name), int)), None)


def _shrink_heads(values: dict[str, Any]) -> dict[str, int]:
    """Return the new numbers of heads, and the new width for every value that equals the old width.

    The ratio of query heads to KV heads stays, up to 8.
    """
    name, kv_name, hidden = (_find_name(values, names) for names in (_HEADS, _KV_HEADS, _HIDDEN))
    if name is None:
        return {hidden: 4 * HEAD_SIZE} if hidden else {}
    old, old_kv = values[name], values[kv_name] if kv_name else values[name]
    per_kv = max(1, min(old // max(old_kv, 1), 8))
    num_kv = min(old_kv, 4 if per_kv == 1 else 2)
    new = {name: num_kv * per_kv}
    if kv_name:
        new[kv_name] = num_kv
    # Layers of another kind with other head counts keep their ratio to these.
    others = {"swa_num_attention_heads": 2 * num_kv * per_kv, "swa_num_key_value_heads": 2 * num_kv}
    if values.get("index_n_heads") == old_kv:  # each chooses for the query heads of one KV head
        others["index_n_heads"] = num_kv
    new |= {other: count for other, count in others.items() if other in values}
    if hidden:
        width = max(num_kv * per_kv, 4) * HEAD_SIZE
        new |= {key: width for key, value in values.items() if type(value) is int and value == values[hidden]
                and key not in _SIZES and key not in new and "position" not in key}  # fmt: skip
        if values.get("intermediate_size") == values[hidden]:
            new["intermediate_size"] = width
    return new


def _choose_head_size(values: dict[str, Any]) -> int:
    """Return the new size of heads, of which a part may be rotated."""
    has_two_parts = values.get("qk_nope_head_dim") and values.get("qk_rope_head_dim")
    is_sum = has_two_parts and values.get("head_dim") == values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    return 2 * HEAD_SIZE if is_sum else HEAD_SIZE


def _find_head_size(values: dict[str, Any]) -> int:
    name, hidden = _find_name(values, _HEADS), _find_name(values, _HIDDEN)
    return values[hidden] // values[name] if name and hidden else 0


def _cap_value(key: str, value: Any, sizes: dict[str, int]) -> Any:
    if isinstance(value, list) and key in sizes and all(type(item) is int for item in value):
        return [min(item, sizes[key]) for item in value]
    if type(value) is not int:
        return value
    if key.endswith(("_token_id", "_token_index")):
        return 0 if key.split("_", maxsplit=1)[0] in _TEXT_TOKENS else _NO_TOKEN
    return min(value, sizes[key]) if key in sizes else value


def _cut_layers(values: dict[str, Any]) -> None:
    """Keep the first layer of each kind, in order, and further layers up to `MIN_LAYERS`."""
    name = _find_name(values, _LAYERS)
    total = len(values.get("layers_block_type", ())) if name is None else values[name]
    if total <= MIN_LAYERS:
        return
    lists = [key for key, value in values.items() if _is_by_layer(key, value, total)]
    first: dict[str, int] = {}
    for index in range(total):
        first.setdefault(_describe_configured_layer(values, lists, total, index), index)
    if len(first) > MAX_LAYERS:
        raise CannotShrink(f"{len(first)} kinds of layers")
    keep = sorted(first.values())
    keep = sorted(keep + [index for index in range(total) if index not in keep][: max(0, MIN_LAYERS - len(keep))])
    values.update({key: [values[key][index] for index in keep] for key in lists})
    _renumber_layers(values, keep, total)
    if name is None:
        return
    values[name] = len(keep)
    if values.get("num_layers_per_stack"):  # stacks are gone through several times, each time with a cache of its own
        rounds = total // values["num_layers_per_stack"]
        values["num_layers_per_stack"] = MIN_LAYERS
        values[name] = MIN_LAYERS * rounds


def _is_by_layer(key: str, value: Any, total: int) -> bool:
    return isinstance(value, list) and len(value) == total and key not in _INDICES


def _renumber_layers(values: dict[str, Any], keep: list[int], total: int) -> None:
    """Adapt the values that name or count layers to the numbers that the kept layers have now."""
    for key, value in list(values.items()):
        if key in _FIRST and type(value) is int:
            values[key] = sum(index < value for index in keep)
        elif key in _LAST and type(value) is int:
            values[key] = sum(index >= total - value for index in keep)
        elif key in _INDICES and isinstance(value, list):
            values[key] = [new for new, index in enumerate(keep) if index in value]
        elif key == "per_layer_config":
            old = {int(index): overrides for index, overrides in value.items()}
            values[key] = {new: dict(old[index]) for new, index in enumerate(keep) if index in old}


def _describe_configured_layer(values: dict[str, Any], lists: list[str], total: int, index: int) -> str:
    """Return a text that is equal for layers that the configuration treats alike."""
    values_of_layer: list[Any] = [values[key][index] for key in lists]
    values_of_layer += [index < values[key] for key in _FIRST if type(values.get(key)) is int]
    values_of_layer += [index >= total - values[key] for key in _LAST if type(values.get(key)) is int]
    values_of_layer += [index in values[key] for key in _INDICES if isinstance(values.get(key), list)]
    values_of_layer += [overrides for at, overrides in values.get("per_layer_config", {}).items() if int(at) == index]
    return json.dumps(values_of_layer, default=str)


def _rope_parameters(values: dict[str, Any]) -> list[dict[str, Any]]:
    rope = values.get("rope_parameters") or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _shrink_rope(rope: dict[str, Any], old_head: int) -> None:
    """Cut lists of factors to the smaller head size, and let the original context be a short window."""
    # Of these a sequence may be longer; other kinds are served up to their original context.
    if rope.get("rope_type") in ("yarn", "llama3") and rope.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = WINDOW
    for key in ("short_factor", "long_factor"):
        if isinstance(rope.get(key), list) and old_head:
            rope[key] = rope[key][: max(1, len(rope[key]) * HEAD_SIZE // old_head)]
    section = rope.get("mrope_section")
    if isinstance(section, list) and old_head:
        smaller = [part * HEAD_SIZE // old_head for part in section]
        smaller[0] += sum(section) * HEAD_SIZE // old_head - sum(smaller)
        rope["mrope_section"] = smaller


def build_tiny_model(
    kind: type[Any], config: Any, seed: int, device: torch.device, attention: str | None = None
) -> Any:
    """Return a random model of a shrunk configuration, in float32. Raises `CannotShrink`."""
    num_parameters = sum(p.numel() for p in _build_skeleton(kind, config).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise CannotShrink(f"{type(config).__name__}: {num_parameters:,} parameters are left")
    try:
        torch.manual_seed(seed)
        options = {} if attention is None else {"attn_implementation": attention}
        module = kind._from_config(config, dtype=torch.float32, **options)  # noqa: SLF001
        _fill_weights(module, seed)
    except Exception as error:
        raise CannotShrink(f"{type(config).__name__}: {type(error).__name__}: {error}") from error
    plain: Any = GenerationConfig
    module.generation_config = plain(pad_token_id=0)
    return module.eval().requires_grad_(False).to(device)


def _build_skeleton(kind: type[Any], config: Any) -> Any:
    """Return a model of a configuration without weights. Raises `CannotShrink`."""
    try:
        with torch.device("meta"):
            return kind._from_config(config)  # noqa: SLF001
    except Exception as error:
        raise CannotShrink(f"{type(config).__name__}: {type(error).__name__}: {error}") from error


@torch.no_grad()
def _fill_weights(module: nn.Module, seed: int) -> None:
    """Give the model random weights with which its tokens depend on attention, so that a mistake there shows."""
    generator = torch.Generator().manual_seed(seed)
    of_embeddings, of_matrices = _SPREADS[seed % len(_SPREADS)]
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if id(parameter) in embeddings:
            parameter.copy_(of_embeddings * noise)
        elif parameter.ndim >= 2:
            parameter.copy_(of_matrices * noise / math.sqrt(math.sqrt(parameter.shape[-1] * parameter.shape[-2])))
        else:
            parameter.add_(0.1 * noise)


def find_layer_kinds(module: nn.Module) -> set[str]:
    """Return a text for each kind of layer in the model: the classes of its parts, and which of them have a window."""
    kinds: set[str] = set()
    for layers in module.modules():
        if isinstance(layers, nn.ModuleList):
            kinds.update(_describe_layer(layer) for layer in layers)
    return kinds


def _describe_layer(layer: nn.Module) -> str:
    parts = {(type(part).__name__, _has_window(part)) for part in layer.modules()}
    return repr(sorted(parts))


def _has_window(part: nn.Module) -> bool:
    return isinstance(getattr(part, "sliding_window", None), int | Tensor)
