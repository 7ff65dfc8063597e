"""Load a model's own weights, and prove the model unless that is noted on this machine."""

import logging
from dataclasses import replace

from penstock.engine.device import describe_device
from penstock.engine.kernels.library import load_library
from penstock.engine.loading.description import Load
from penstock.engine.loading.probe import probe_layout
from penstock.engine.loading.proof import describe_proof, prove_model
from penstock.engine.memory.memory import check_memory
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.weights.forms import can_use_blocks
from penstock.engine.weights.module import build_skeleton, check_weight_sizes, count_bytes, load_module
from penstock.engine.weights.quantized import unpack_weights
from penstock.engine.weights.weights import MappedWeights

log = logging.getLogger("penstock.engine")


def load_checkpoint(load: Load) -> LoadedModel:
    """Load the model's own weights. A GGUF file's matrices that the kernels will compute with stay there until then."""
    native, weights = load_library(), MappedWeights(load.files)
    with load.measure("skeleton"):
        limit = 4 * len(weights.tensors) + 1000
        skeleton = build_skeleton(load.config, load.dtype, limit, sees=load.has_vision)
    unpack_weights(weights, load.quantization, load.dtype)
    if native is not None and load.can_pack():
        weights.keeps_blocks = can_use_blocks(native, load.settings.weights)
    check_weight_sizes(skeleton, weights)
    num_bytes = count_bytes(skeleton) - weights.count_saved_bytes()
    check_memory(num_bytes, load.settings.pool_mb, load.device, load.picture_bytes)
    load.hash_files()
    with load.measure("weights"):
        module = load_module(skeleton, load.config, weights, load.device, load.report, sees=load.has_vision)
        layout = probe_layout(module, load.settings.block_size, load.dtype, load.device)
        layout = replace(layout, is_int8=load.settings.kv_dtype == "int8")
        if layout.attends_internally:
            log.warning(
                "%s computes attention itself: the sequences of a step are computed one after the other",
                load.settings.model,
            )
        weights.drop_pages()
        weights.read_when_used(module)  # the layout does not depend on values
    return load.build_model(
        module, layout,
        vocab_size=module.get_input_embeddings().num_embeddings,
        stock_attention=module.config._attn_implementation,  # noqa: SLF001 - transformers has no public name for it
        device_name=describe_device(load.device),
        weights=weights,
    )  # fmt: skip


def prove_once(load: Load, model: LoadedModel) -> LoadedModel:
    """Return what `prove_model` returns, which is not proved again where all that the proof depends on is noted."""
    about = describe_proof(model, load.settings)
    if load.load_cache.read_finding("proof", about):
        model = accelerate_model(model, load.settings.weights)
        load.report("checking the engine", 1.0)
        return model
    model = prove_model(model, load.settings, load.report)
    load.load_cache.write_finding("proof", about, found=True)
    return model
