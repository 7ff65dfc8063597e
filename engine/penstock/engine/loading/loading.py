"""Load a model: weights, tokenizer, the form of its KV blocks, and the fingerprint that names all of it.

`demo` is the model in this repository; a directory or a hub name takes the same way. Only safetensors and GGUF files
are read, so loading runs no code of the model's author.

    files ─▶ enough memory? ─▶ map, sizes agree? ─▶ read once: digests ─▶ module ─▶ probe ─▶ fingerprint

`description.py` reads all that is known before the weights, and `checkpoint.py` loads these. Quantised weights are
unpacked while the module reads them (`quantized.py`). Where there is a file of packed weights, `packed.py` maps it
instead, and no tensor of the checkpoint is read (`packed_model.py`). Hashes of files and the proof are
noted on this machine (`load_cache.py`), so that the next start finds them.
"""

import logging
from dataclasses import replace

from penstock.config.settings import EngineSettings
from penstock.engine.loading.checkpoint import load_checkpoint, prove_once
from penstock.engine.loading.description import Load, as_load_errors
from penstock.engine.loading.dtype import PARTLY_NATIVE
from penstock.engine.loading.packed import open_packed
from penstock.engine.memory.memory import check_memory
from penstock.engine.model.model import LoadedModel
from penstock.engine.weights.files import Progress, find_model, find_weight_files, ignore_progress
from penstock.engine.weights.forms import GGUF, QUANTIZED
from penstock.errors import ModelLoadError, ModelUnavailable

log = logging.getLogger("penstock.engine")


def load_stage_models(
    settings: EngineSettings, report: Progress = ignore_progress, *, only_prompts: bool = False, sees: bool = True
) -> LoadedModel:
    """Load and prove the model, twice where prompts and answers are computed with weights in two forms.

    Returns the one for answers, which has that for prompts; with `only_prompts` that for prompts. Raises as
    `open_engine`.
    """
    for_prompts = settings.model_copy(update={"weights": settings.prefill_weights or settings.weights})
    forms = _name_form(for_prompts, settings.weights), _name_form(settings, for_prompts.weights)
    if forms[0] == forms[1]:
        used = for_prompts if only_prompts else settings
        return open_model(used, report, sees=sees)
    for_prompts = for_prompts.model_copy(update={"packed": ""})  # it names the file for answers
    prompts = open_model(for_prompts, report, sees=sees)
    prompts = replace(prompts, stage_forms=forms)
    if prompts.layout.states is not None:
        raise ModelLoadError(
            f"{settings.model} keeps a recurrent or convolution state, which one form of weights computes: leave out "
            f"PENSTOCK_ENGINE_PREFILL_WEIGHTS"
        )
    if only_prompts:
        return prompts
    # Both write to one pool, in the dtype that was chosen for prompts.
    dtype = str(prompts.dtype).removeprefix("torch.")
    answers = open_model(settings.model_copy(update={"dtype": dtype}), report, sees=False)
    if answers.content_fingerprint != prompts.content_fingerprint:
        raise ModelUnavailable(f"{settings.model} was written to while it was loaded")
    return replace(
        answers, stage_forms=forms, prompt_model=prompts, dtype_reason=prompts.dtype_reason,
        picture_reader=prompts.picture_reader,
    )  # fmt: skip


def _name_form(settings: EngineSettings, other: str) -> str:
    """Return the form of a stage's weights: what has the same bits has the same name. `other` is the other stage's."""
    if settings.weights != "auto" or other == "auto":  # where both stages have one setting there is nothing to tell
        return settings.weights if settings.weights in QUANTIZED else ""
    with as_load_errors(settings.model):
        files = find_weight_files(find_model(settings.model, ignore_progress, settings.find_cache_directory()))
    return GGUF if files[0].suffix == ".gguf" else ""


def load_model(settings: EngineSettings, report: Progress = ignore_progress, *, sees: bool = True) -> LoadedModel:
    """Load `settings.model`. Raises `ModelLoadError`, with the reason, for anything that cannot be served."""
    with as_load_errors(settings.model):
        model = load_checkpoint(Load(settings, report, sees=sees))
        check_memory(model.weights.count_saved_bytes(), settings.pool_mb, model.device)
        model.weights.read_to_stay(*model.module.modules())
    return model


def open_model(settings: EngineSettings, report: Progress = ignore_progress, *, sees: bool = True) -> LoadedModel:
    """Return the model, proved and ready to serve: from a packed file where there is one, else packed here.

    Raises as `open_engine`.
    """
    with as_load_errors(settings.model):
        load = Load(settings, report, sees=sees)
        model = open_packed(load)
        if model is None:
            model = load_checkpoint(load)
            with load.measure("proof"):
                model = prove_once(load, model)
    load.log_end()
    if load.chosen.is_open and model.native is not None and model.native.body is None:
        log.info("%s is loaded again in float32: %s", settings.model, PARTLY_NATIVE)
        del model  # it holds its weights
        model = open_model(settings.model_copy(update={"dtype": "float32", "packed": ""}), report, sees=sees)
        return replace(model, dtype_reason=PARTLY_NATIVE)
    return model
