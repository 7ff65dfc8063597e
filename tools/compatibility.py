"""Which architectures of transformers the engine serves, found by trying all of them.

`python -m tools.compatibility docs/models.md` builds a tiny random model of each, proves it next to
`generate()` (`proof.py`), and writes the table.
"""

import argparse
import copy
import gc
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.handover import export_blocks
from penstock.engine.model import LoadedModel
from penstock.engine.probe import check_config, probe_layout
from penstock.engine.proof import (
    MIN_DISTINCT_TOKENS,
    Inconclusive,
    ReferenceAnswers,
    generate_references,
    hand_over,
    make_proof_settings,
    prove_engine,
    run_prompts,
    run_to_end,
)
from penstock.engine.tiny import CannotShrink, build_tiny_model, shrink_config
from penstock.errors import ModelLoadError
from tools.compatibility_cases import AS_DECODER, KEYWORDS, REASONS, SIZES

ARCHITECTURES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""transformers' names of model types."""
CONTEXT_TOKENS = 128
NUM_SEEDS = 5
_CPU = torch.device("cpu")

QUANTISED = """\
## Quantised weights

Checkpoints whose `config.json` has a `quantization_config` of these formats are served as they are published:

- `compressed-tensors`: `pack-quantized` with 4 or 8 bits, `int-quantized` and `float-quantized` (FP8); scales by
  tensor, channel, group or block, with and without zero points; reordered groups (`weight_g_idx`); several groups of
  modules.
- `gptq`: 4 and 8 bits, `checkpoint_format` `gptq` and `gptq_v2`, with and without `sym` and `desc_act`.
- `awq`: 4 bits, `version` `gemm`.
- `fp8`: a scale for the tensor, for each row or for each block (`weight_block_size`, as in DeepSeek-V3).
- `mxfp4`: the experts of gpt-oss.

Each weight is unpacked at load, one after the other, to the plain one that it stands for: computed in float32, and
rounded once to the dtype in which the engine runs (`PENSTOCK_ENGINE_DTYPE`). From then on the model is like any other.
It takes the memory of the plain model, not of its files, and workers of a host do not share it through the page cache;
`PENSTOCK_ENGINE_WEIGHTS` may keep it in fewer bits again ([precision of weights](precision.md)).
Activations are computed in the engine's dtype, also where the format would quantise them at run time. The tokens are
those of `generate()` with the unpacked weights, and the log says how many tensors were unpacked. The fingerprint is not
that of the model before it was quantised: the two exchange no KV blocks.

Refused by name, before weights are read: other formats (bitsandbytes, AQLM, NVFP4 and more), other numbers of bits,
activations with fixed scales (`activation_scheme` `static`), scales of a quantised KV cache, and GGUF files. A tensor
that is missing, that has another shape or type than the format says, or whose values are not finite, is refused with
its name.
"""
"""The page's section about quantised weights."""


@dataclass(frozen=True)
class Verdict:
    """What was found out about one architecture."""

    architecture: str
    model: str
    """Name of the class."""
    reason: str
    """Why it is refused, a sentence; empty if it works."""

    @property
    def works(self) -> bool:
        """Whether its tokens were proved equal."""
        return not self.reason


def judge_architecture(architecture: str) -> Verdict:
    """Build a tiny model of the architecture and prove it."""
    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    reason = ""
    try:
        _prove_architecture(architecture)
    except (ModelLoadError, CannotShrink, Inconclusive) as error:
        reason = REASONS.get(architecture) or _make_sentence(error)
    return Verdict(architecture, names[architecture], reason)


def _prove_architecture(architecture: str) -> None:
    try:
        config = CONFIG_MAPPING[architecture](**KEYWORDS.get(architecture, {}))
    except Exception as error:
        raise CannotShrink(f"no model can be made of its default configuration: {error}") from error
    check_config(config)
    auto: Any = AutoModelForCausalLM
    kind = auto._model_mapping[type(config)]  # noqa: SLF001 - as AutoModelForCausalLM.from_config does
    if kind.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    config = shrink_config(config, SIZES.get(architecture))
    for seed in range(NUM_SEEDS):
        reference = build_tiny_model(kind, config, seed, _CPU)
        model = make_loaded_model(architecture, copy.deepcopy(reference))
        try:
            references = generate_references(reference, model.vocab_size, CONTEXT_TOKENS, _CPU)
            prove_engine(model, EngineSettings(), references)
            check_damage_shows(model, references)
        except Inconclusive:
            if seed == NUM_SEEDS - 1:
                raise
        else:
            break
    prove_engine(accelerate_model(model), EngineSettings(), references)


def check_damage_shows(model: LoadedModel, references: ReferenceAnswers) -> None:
    """Raise `Inconclusive` if damaged KV blocks that are handed over give the tokens of `references` too."""
    settings = make_proof_settings(model, EngineSettings(), references)
    first, second = (Engine(model, settings, quarantine=False) for _ in range(2))
    damaged = [
        hand_over(second, seq, [_damage_payload(model, payload) for payload in export_blocks(first, seq)])
        for seq in run_prompts(first, references.prompts)
    ]
    run_to_end(second, damaged)
    if [seq.output_token_ids for seq in damaged] == references.expected:
        raise Inconclusive("damaged KV blocks change none of its tokens")


def _damage_payload(model: LoadedModel, payload: bytes) -> bytes:
    """Return a block's bytes, moved on by a token and a half."""
    shift = 3 * len(payload) // (2 * len(model.layout.layers) * model.layout.block_size)
    shift -= shift % model.dtype.itemsize
    return payload[shift:] + payload[:shift]


def make_loaded_model(name: str, module: Any) -> LoadedModel:
    """The module as if it was loaded. Raises `ModelLoadError` if it cannot be paged."""
    return LoadedModel(
        name=name,
        config=module.config,
        tokenizer=None,
        response_template=None,
        context_length=CONTEXT_TOKENS,
        eos_token_ids=frozenset(),
        dtype=torch.float32,
        device=_CPU,
        content_fingerprint="",
        module=module,
        layout=probe_layout(module, EngineSettings().block_size, torch.float32, _CPU),
        vocab_size=module.get_input_embeddings().num_embeddings,
        stock_attention=module.config._attn_implementation,  # noqa: SLF001 - transformers has no public name for it
    )


def _make_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    for mark in (" cannot be served: ", " on this engine: "):
        _, found, rest = text.partition(mark)
        if found:
            text = rest
    return f"{text[:1].upper()}{text[1:200]}".rstrip(".") + "."


def make_row(verdict: Verdict) -> str:
    """The verdict's line of the table."""
    note = verdict.reason
    if verdict.works and verdict.architecture in AS_DECODER:
        note = "As a decoder: its configuration must say `is_decoder`."
    return f"| {verdict.architecture} | {verdict.model} | {'works' if verdict.works else 'refused'} | {note} |"


def make_page(verdicts: list[Verdict]) -> str:
    """docs/models.md."""
    num_works = sum(verdict.works for verdict in verdicts)
    min_distinct = MIN_DISTINCT_TOKENS
    rows = "\n".join(make_row(verdict) for verdict in verdicts)
    return f"""# Models

{num_works} of the {len(verdicts)} causal-language-model architectures of transformers {transformers.__version__} work.
This page is written by `python -m tools.compatibility docs/models.md` with torch
{torch.__version__.partition("+")[0]} and Python {platform.python_version()}, in float32 on a CPU.

**works**: a small random model of the architecture, made from its default configuration with every kind of layer it
has and windows of a few tokens, said the same tokens on the engine as in `generate()`: in a batch with others and in
small chunks, with its prefix found in the pool, and handed over as exported KV blocks to a second engine with a pool of
its own; on PyTorch's operators and on the native kernels. It said at least {min_distinct} different tokens, and other
ones once the exported blocks were damaged.

**refused**: it cannot be served, or was not proved, for this reason. Nothing is served unproved: at load the same
proof is run on a small copy of the model's own configuration, and the model itself must give the logits of the plain
transformers model for one prompt.

{QUANTISED}
## Architectures

| Architecture | Class | | Reason |
|---|---|---|---|
{rows}
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    _silence_transformers()
    verdicts = []
    console = Console(stderr=True)
    for architecture in track(ARCHITECTURES, "trying architectures", console=console):
        verdicts.append(judge_architecture(architecture))
        gc.collect()
    text = make_page(verdicts)
    file.write_text(text)
    console.print(f"{file}: {sum(verdict.works for verdict in verdicts)} of {len(verdicts)} work")


def _silence_transformers() -> None:
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")


if __name__ == "__main__":
    main()
