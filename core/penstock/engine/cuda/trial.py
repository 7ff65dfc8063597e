"""Find the layers that `varlen_attn` computes: those for which it gives the same as torch on this GPU.

What its kernels support depends on the GPU, its libraries, the dtype, and the sizes of heads and blocks. So each layer
is tried, and one that is refused or gives other results stays on the torch path.
"""

import random

import torch

from penstock.engine import hooks
from penstock.engine.attention import LayerAttention, attend_gathered
from penstock.engine.cuda.varlen import VarlenStep, Windows, make_calls
from penstock.engine.masks import find_window, get_visibility
from penstock.engine.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.engine.step import Step, gather_rows
from penstock.engine.step_batch import StepBatch
from penstock.engine.storage import KVStorage, LayerShape
from penstock.messages import Sampling

DTYPES = (torch.float16, torch.bfloat16)
MAX_RELATIVE_ERROR = 0.02
"""Root mean square of the error of the results, relative to theirs."""
NUM_PROBE_TOKENS = 6
"""Length of the prompt with which the model's layers show the parameters of their attention."""
MAX_TRIAL_TOKENS = 4200
"""Tokens of the longest sequence of a trial: kernels go through K and V in tiles of 64 to 256 tokens, and split long
sequences. Longer windows are tried up to this length only."""
TRIAL_POOL_BYTES = 10 * 2**30
"""Memory of a trial's blocks, if half as much again is free. Kernels with 32-bit offsets read other blocks than they
should where a pool has 2^31 numbers or more: 4 GiB in 16 bits.
"""


@torch.inference_mode()
def find_varlen_windows(model: LoadedModel) -> Windows:
    """Return the windows of the layers for which `varlen_attn` gives the right results."""
    windows: Windows = {}
    if model.dtype not in DTYPES:
        return windows
    tried: dict[tuple[object, ...], int | None] = {}
    for layer, how in reversed(_watch_layers(model).items()):  # the last of a kind has the largest offset in a block
        shape = model.layout.by_layer[layer]
        key = (
            shape.k_shape,
            shape.v_shape,
            how.num_heads,
            how.scale,
            has_plain_scores(how),
            id(how.rule),
            how.window,
        )
        if key not in tried:
            tried[key] = try_layer(model, shape, how)
        window = tried[key]
        if window is not None:
            windows[layer] = window
    return windows


def has_plain_scores(how: LayerAttention) -> bool:
    """Return whether scores are scaled products without softcap and sinks."""
    return not how.softcap and how.sinks is None


def _watch_layers(model: LoadedModel) -> dict[int, LayerAttention]:
    """Return the attention parameters of the layers that get K and V exactly as the cache returned them."""
    num_tokens = min(NUM_PROBE_TOKENS, model.context_length - 1)
    seq = _make_sequence("look", num_tokens, 0)
    seq.block_table = list(range(-(-num_tokens // model.layout.block_size)))
    batch = StepBatch([(seq, num_tokens)], model.layout.block_size, model.device)
    step = Step(batch, KVStorage(model.layout, len(seq.block_table), model.device))
    with hooks.run_with_step(model.module, step):
        ids, positions = batch.input_ids, batch.position_ids
        model.module(input_ids=ids, position_ids=positions, past_key_values=hooks.PagedCache(), use_cache=True)
    return step.attention_by_layer


def try_layer(model: LoadedModel, shape: LayerShape, how: LayerAttention) -> int | None:
    """Return the layer's window if `varlen_attn` computes its attention over random K and V right, otherwise None."""
    visible = get_visibility(how.rule, how.window)
    window = find_window(visible, model.context_length)
    if window is None or not has_plain_scores(how):
        return None
    batch = _make_trial_batch(min(model.context_length, MAX_TRIAL_TOKENS), model.layout.block_size, model.device)
    used = [block for seq, _ in batch.plan for block in seq.block_table]
    num_blocks = max(len(used), _count_pool_bytes(model.device) // model.layout.block_bytes)
    for seq, _ in batch.plan:  # every other block is one of the last
        seq.block_table = [num_blocks - 1 - block // 2 if block % 2 else block // 2 for block in seq.block_table]
    used = [block for seq, _ in batch.plan for block in seq.block_table]
    storage = KVStorage(model.layout, num_blocks, model.device)
    generator = torch.Generator(model.device).manual_seed(3)
    for blocks in (storage.keys[shape.layer], storage.values[shape.layer]):
        content = torch.empty((len(used), *blocks.shape[1:]), dtype=model.dtype, device=model.device)
        blocks[torch.tensor(used, device=model.device)] = content.normal_(generator=generator)
    size = (1, how.num_heads, batch.num_tokens, shape.k_shape[1])
    query = torch.empty(size, dtype=model.dtype, device=model.device).normal_(generator=generator)
    calls = make_calls(batch.plan, model.layout.block_size, model.device)
    step = VarlenStep(batch, storage, {shape.layer: window}, calls)
    try:
        mine = step.compute_layer(shape.layer, query, how.scale).float()
    except (RuntimeError, TypeError, ValueError):
        return None
    masks = step.gathered.make_masks(visible, model.dtype)
    key, value = (gather_rows(pool[shape.layer], step.gathered.block_ids) for pool in (storage.keys, storage.values))
    right = attend_gathered(step.gathered, (query, key, value), masks, how).float()
    error, spread = (mine - right).square().mean().sqrt(), right.square().mean().sqrt()
    return window if bool(error <= MAX_RELATIVE_ERROR * spread) else None


def _count_pool_bytes(device: torch.device) -> int:
    """Return how much memory a trial takes for its blocks."""
    if device.type != "cuda":
        return TRIAL_POOL_BYTES
    return min(TRIAL_POOL_BYTES, torch.cuda.mem_get_info(device)[0] * 2 // 3)


def _make_trial_batch(length: int, block_size: int, device: torch.device) -> StepBatch:
    """Make a batch of three decodes and two chunks, of up to `length` tokens, with blocks in random order."""
    plan = []
    middle = min(length, 302)
    for number, (end, num) in enumerate(((1, 1), (length // 2 + 1, 1), (length, 1), (middle, 0), (length, 7))):
        num_new = num or end
        plan.append((_make_sequence(f"trial-{number}", end, max(0, end - num_new)), min(num_new, end)))
    blocks = list(range(sum(-(-len(seq.token_ids) // block_size) for seq, _ in plan)))
    random.Random(4).shuffle(blocks)
    for seq, _ in plan:
        seq.block_table = [blocks.pop() for _ in range(-(-len(seq.token_ids) // block_size))]
    return StepBatch(plan, block_size, device)


def _make_sequence(name: str, length: int, num_computed_tokens: int) -> Sequence:
    seq = Sequence(name, [0] * length, sampling=Sampling(), seed=0, max_new_tokens=1)
    seq.num_computed_tokens = num_computed_tokens
    return seq
