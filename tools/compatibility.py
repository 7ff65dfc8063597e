"""Which published checkpoints and which architectures of transformers the engine serves, found by trying all of them.

`python -m tools.compatibility docs/models.md` builds a tiny random model from each configuration, proves it next to
`generate()` (`proof.py`), and writes the page, and which windows were proved (`engine/proved.json`).
"""

import argparse
import copy
import gc
import json
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
from penstock.engine.engine import Engine
from penstock.engine.loading.probe import check_config, probe_layout
from penstock.engine.loading.windows import PROVED, find_windows
from penstock.engine.memory.storage import BlockLayout
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.layer import NativeLayer
from penstock.engine.model.model import LoadedModel
from penstock.engine.weights.module import build_skeleton
from penstock.errors import ModelLoadError
from tools.compatibility_cases import AS_DECODER, CHECKPOINT_REASONS, KEYWORDS, REASONS, SIZES
from tools.handover import export_blocks, export_state
from tools.proof import (
    MIN_DISTINCT_TOKENS,
    PROMPT_LENGTHS,
    Inconclusive,
    ReferenceAnswers,
    generate_references,
    hand_over,
    make_proof_settings,
    prove_engine,
    run_prompts,
    run_to_end,
)
from tools.published import (
    Checkpoint,
    CheckpointVerdict,
    check_weights,
    describe_weights,
    make_config,
    make_rows,
    make_usage_table,
    read_checkpoints,
)
from tools.tiny import CannotShrink, build_tiny_model, shrink_config, shrink_model

ARCHITECTURES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""transformers' names of model types."""
CONTEXT_TOKENS = 128
NUM_SEEDS = 5
_CPU = torch.device("cpu")

WORKS = "Work:"
WORKS_AS_DECODER = "Work as decoders, if their configuration says `is_decoder`:"

CONTEXT = """\
## Context

A model is served with the context of its configuration, except where a rotary embedding changes its frequencies once a
sequence is longer than the original context (`longrope`, `dynamic`): the cached keys of such a sequence would have the
frequencies of its beginning. Such a model is served up to its original context, and the load logs both numbers:
Phi-3.5-mini and Phi-4-mini have 4,096 of their 131,072 tokens.
"""
"""The page's section about models that are served with a part of their context."""

QUANTISED = """\
## Quantised weights

Checkpoints whose `config.json` has a `quantization_config` of these formats are served as they are published:

- `compressed-tensors`: `pack-quantized` with 4 or 8 bits, `int-quantized`, `float-quantized` (FP8) and
  `nvfp4-pack-quantized`; scales by tensor, channel, group or block, with and without zero points; reordered groups
  (`weight_g_idx`); several groups of modules.
- `gptq`: 4 and 8 bits, `checkpoint_format` `gptq` and `gptq_v2`, with and without `sym` and `desc_act`.
- `awq`: 4 bits, `version` `gemm`.
- `fp8`: a scale for the tensor, for each row or for each block (`weight_block_size`, as in DeepSeek-V3).
- `mxfp4`: the experts of gpt-oss.
- `modelopt`: `FP8`, `FP8_PER_CHANNEL_PER_TOKEN`, `NVFP4` and `MIXED_PRECISION` of these.
- `bitsandbytes`: 4 bits (`nf4`, `fp4`, with and without double quantisation), and 8 bits.

Each weight is unpacked at load to the plain number that it stands for: computed in float32, and
rounded once to the dtype in which the engine runs (`PENSTOCK_ENGINE_DTYPE`). From then on the model is like any other.
It takes the memory of the plain model, not of its files, and workers of a host do not share it through the page cache;
`PENSTOCK_ENGINE_WEIGHTS` may keep it in fewer bits again ([precision of weights](precision.md)).
Activations and the KV cache are in the engine's dtype, also where the format would quantise them: a checkpoint's
scales for them are not used. The tokens are those of `generate()` with the unpacked weights, and the log says
how many tensors were unpacked. The fingerprint differs
from that of the model before it was quantised: the two exchange no KV blocks.

Refused by name, before weights are read: other formats (AQLM, HQQ and more), other numbers of bits, and inputs that a
layer scales first (`pre_quant_scale`). A tensor that is missing, that has another shape or type than the format says,
or whose values are not finite, is refused with its name.

### GGUF files

`PENSTOCK_ENGINE_MODEL` may be a `.gguf` file, or a directory with one, of the architectures `llama` (Llama, Mistral),
`qwen2` and `qwen3`. Tensors may be F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q4_K, Q5_1, Q5_0, Q4_1 and Q4_0, as in the files
that are called Q8_0, Q6_K, Q5_K_M, Q4_K_M and the like.

On processors with AVX2 or AVX-512 the kernels compute with the numbers and scales of the file itself, which are put
into another order once and are never rounded: Q8_0 takes 8.5 bits a weight in memory, Q6_K 6.6, Q5_K 6.8, Q5_0 6.5,
Q4_K 4.8 and Q4_0 4.5. The inputs of such a layer become integers of 8 bits, as with `int8`
([precision](precision.md#a-gguf-files-own-numbers)). Layers that read the same input may be of several types; a pair of
gate and up with two types is unpacked. An embedding that is also the output layer keeps the file's numbers, too.

Everything else is unpacked as above, to exactly the values that the format defines: Q4_1 and Q5_1, an embedding of its
own, and all tensors with `PENSTOCK_ENGINE_WEIGHTS=bf16`, on other processors and in float16. The log says which. The
values of layers that keep the file's numbers are read for one matrix at a time while the model is loaded.

The header is written as a configuration and a tokenizer, once, to `gguf` in the
[cache directory](settings.md) (by a gateway that tokenizes: in the default one). transformers 5.23, or a later 5, makes
the tokenizer. The factors of the rotary embedding of Llama 3.1 to 3.3 are recognised. Download a file on the hub first,
by hand. vLLM as the engine takes no such files.

Refused by name: other architectures and types (Q2_K, Q3_K, IQ…, MXFP4), files in parts (`llama-gguf-split --merge`
joins them), a directory with several files, files without a tokenizer, scaled positions (YaRN), sliding windows,
experts, and tensors that the architecture does not have. A file is checked before it is read: each length in its header
must be within the file.
"""
"""The page's section about quantised weights."""

FILES = """\
## Files

A model's files may come from anywhere. No code in them is run: only safetensors and GGUF are read, never pickles, and
neither `auto_map` nor an attention implementation of the hub. A damaged or hostile file is refused by a line that says
what is wrong and what would work. Before transformers makes anything of `config.json`, its numbers of layers, heads,
experts, labels and the like are compared with 4,096. While the model is built without memory, its tensors are compared
with those of the weights, and then the values and tables that they take. A tensor of a GGUF file must be within the
file and outside of the other tensors, and an index names files of its own directory. Weights that are no finite numbers
are named with their file. Encoders (BERT) and classifiers are refused. Errors that `config.json`, the tokenizer's files
and the first bytes of the weights show are reported [before torch is imported](your-model.md#when-it-says-no).

The 320 files of `tests/engine/hostile_files.py` each took less than a second and 50 MB beyond the import. The memory of
a load grows with the file itself: one with 300,000 tensors that belong to nothing took 600 MB.
"""
"""The page's section about files that are damaged, or made to do harm."""

MIXTURES = """\
## Mixtures of experts

Where a layer has its experts in two merged tensors, as nearly all mixtures in transformers have, the native kernels of
a CPU compute them in one call, in every form of the weights, and the router's product with its weight in another.
Their results are compared with the original at load, and the kernels are used only where they are the same. Weights are
freed layer by layer as they are packed, so that memory never holds the model twice, unpacked checkpoints included. In
bfloat16 tokens do not depend on the batch, the chunks or the number of threads.

With latent attention (DeepSeek, Kimi, GLM-4.7-Flash) that holds for the experts alone: PyTorch computes the attention,
and its sums may depend on the chunks in which a prompt is read. In bfloat16 a token may therefore depend on the chunks,
and on how much of the prompt was found in the store; in float32 tokens are those of `generate()`. In bfloat16 the next
turn's prompt does not find blocks with tokens of an answer, as answers attend to latents and prompts to K and V.

The experts of `dbrx`, `jetmoe` and `llama4_text` have forms of their own and run on PyTorch's operators.
In float32 their tokens are those of `generate()`; in bfloat16 a token of theirs may depend on the batch.
"""
"""The page's section about mixtures of experts."""

STATES = """\
## States

Some layers keep a recurrent or convolution state instead of keys and values (`linear_attention`, `conv`, Mamba). They
are served on a CPU, by transformers' modules as they are; their linear layers and norms run on the native kernels, and
so do convolution and recurrence of single tokens. Tokens of all sequences of a batch are read at once if a comparison
at load shows that this changes no bit. The state of each running sequence and the snapshots share
`PENSTOCK_ENGINE_POOL_MB` with the KV blocks. If the states of `PENSTOCK_ENGINE_MAX_BATCH` sequences do not fit in it,
fewer sequences run, and a warning says so.

Snapshots of states go to the store with the KV, so a decode worker goes on where the prompt ended, and a worker that
takes a request over goes on at the last snapshot. A found prefix counts up to its last snapshot; answers have none.
The engine drafts tokens if a comparison at load shows that no token's bits depend on other tokens of the step (they do
with latent attention, or experts on PyTorch's operators). Drafts are read into a copy of the state, and the right ones
once more into the state itself, so it is the state that single tokens give.
Models without keys and values (Mamba, RWKV, xLSTM)
are refused, and so are models that keep a state in their modules (RecurrentGemma, MiniMax).
"""
"""The page's section about layers that keep a state."""

ALONE = """\
## Attention of its own

Some models compute their attention inside their own modules (BLOOM, Falcon, GPT-J), or an indexer chooses which tokens
a layer attends to (DeepSeek-V3.2, GLM-5, MiniMax-M3). Such a model reads one sequence at a time, on a CPU: the engine
gives it a cache like transformers' own, the indexer's keys included, and it attends to that unchanged. Its linear
layers and norms run on the native kernels. The log says so at load. A batch saves no time; KV blocks, prefixes and
hand-over are those of all models. It is not packed, and has no int8 KV. Layers that compress several tokens to one
(DeepSeek-V4) are refused.

An indexer may give several tokens the same score: exactly 0, where none of its heads wants them. Which of those it
chooses depends in transformers on how long the prompt is, and on the chunks in which it is read, so that even
`generate()` differs from the model's own pass over all tokens. The engine chooses the first ones: in float32 tokens
depend neither on chunks nor on the batch, and are those of `generate()` where that is made to choose so as well, as for
this page.
"""
"""The page's section about models that attend by themselves."""


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


def judge_checkpoint(checkpoint: Checkpoint) -> CheckpointVerdict:
    """Prove a small copy of the model that the configuration describes, and look at the format of its weights."""
    kernels = reason = ""
    try:
        config = make_config(checkpoint)
        check_config(config)
        check_weights(config)
        skeleton = build_skeleton(config, torch.float32)
        kernels = _prove_small_model(type(skeleton), shrink_model(skeleton))
    except (ModelLoadError, CannotShrink, Inconclusive) as error:
        reason = CHECKPOINT_REASONS.get(checkpoint.config["model_type"]) or _make_sentence(error)
    return CheckpointVerdict(checkpoint, kernels, describe_weights(checkpoint), reason)


_proved: dict[str, str | Exception] = {}
"""What was found out about the small models so far, by class and configuration: many checkpoints have the same."""


proved_windows: dict[str, set[str]] = {}
"""By type of model: which windows the small models have that were proved so far."""


def _prove_small_model(kind: type[Any], config: Any) -> str:
    key = f"{kind.__name__} {config.to_json_string(use_diff=False)}"
    if key not in _proved:
        try:
            _proved[key] = _describe_kernels(_prove_config(kind, config))
        except (ModelLoadError, CannotShrink, Inconclusive) as error:
            _proved[key] = error
    found = _proved[key]
    if isinstance(found, Exception):
        raise found
    return found


def _describe_kernels(model: LoadedModel) -> str:
    """Return how much of the model the native kernels compute, and whether it reads one sequence at a time."""
    if model.native is None:
        return "none"
    if model.native.body is not None:
        return "whole"
    num_native = sum(isinstance(part, NativeLayer) for part in model.module.modules())
    return "layers" if num_native == len(model.layout.layers) else "parts" + ", alone" * model.layout.attends_internally


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
    _prove_config(kind, shrink_config(config, SIZES.get(architecture)))


def _prove_config(kind: type[Any], config: Any) -> LoadedModel:
    """Prove a tiny model of the configuration, on torch's operators and on the native kernels; return the latter's.

    Raises `ModelLoadError`, `CannotShrink` or `Inconclusive`, the last if a window is longer than the prompts, too.
    """
    windows = find_windows(config)
    for name, size in windows.items():
        if size >= max(PROMPT_LENGTHS):
            raise Inconclusive(f"its {name} of {size} is longer than the prompts of the proof")
    for seed in range(NUM_SEEDS):
        reference = build_tiny_model(kind, config, seed, _CPU)
        model = make_loaded_model(config.model_type, copy.deepcopy(reference))
        try:
            references = generate_references(reference, model.vocab_size, CONTEXT_TOKENS, _CPU)
            prove_engine(model, EngineSettings(), references)
            check_damage_shows(model, references)
        except Inconclusive:
            if seed == NUM_SEEDS - 1:
                raise
        else:
            break
    model = accelerate_model(model)
    prove_engine(model, EngineSettings(), references)
    proved_windows.setdefault(config.get_text_config(decoder=True).model_type, set()).update(windows)
    return model


def check_damage_shows(model: LoadedModel, references: ReferenceAnswers) -> None:
    """Raise `Inconclusive` if damaged KV blocks that are handed over give the tokens of `references` too."""
    settings = make_proof_settings(model, EngineSettings(), references)
    first, second = (Engine(model, settings, quarantine=False) for _ in range(2))
    damaged = [
        hand_over(
            second,
            seq,
            [_damage_payload(model, payload) for payload in export_blocks(first, seq)],
            export_state(first, seq),
        )
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
        layout=_probe_tiny_layout(module),
        vocab_size=module.get_input_embeddings().num_embeddings,
        stock_attention=module.config._attn_implementation,  # noqa: SLF001 - transformers has no public name for it
    )


def _probe_tiny_layout(module: Any) -> BlockLayout:
    """Return what the module caches, with scan chunks that are shorter than its prompts."""
    size = EngineSettings().block_size
    return probe_layout(module, size, torch.float32, _CPU, scan_chunk_tokens=size)


def _make_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()).partition(": use a checkpoint")[0]
    for mark in (" cannot be served: ", " on this engine: "):
        _, found, rest = text.partition(mark)
        if found:
            text = rest
    return f"{text[:1].upper()}{text[1:200]}".rstrip(".") + "."


def make_page(checkpoints: list[CheckpointVerdict], verdicts: list[Verdict]) -> str:
    """docs/models.md."""
    num_served = sum(verdict.is_served for verdict in checkpoints)
    num_works = sum(verdict.works for verdict in verdicts)
    return f"""# Models

Does a model run? Look for its name below. **{num_served} of {len(checkpoints)} published checkpoints** give
the tokens of transformers' `generate()`. This page is written by `python -m tools.compatibility docs/models.md`, with
transformers
{transformers.__version__}, torch {torch.__version__.partition("+")[0]} and Python {platform.python_version()}, in
float32 on a CPU.

**equal**: a small random model gave the same tokens on the engine as in `generate()`. It is made from the checkpoint's
own configuration, with every kind of layer it has, fewer and narrower layers, and windows of a few tokens. It is tried
in a batch with others and in small chunks, with its prefix found in the pool, and handed over as exported KV blocks to
a second engine with a pool of its own; on PyTorch's operators and on the native kernels. It must give at least
{MIN_DISTINCT_TOKENS} different tokens, and other ones when the exported blocks are damaged. The last column says how
much the native kernels compute on a CPU: the **whole** model in one call, its **layers** in one call each, or **parts**
of them (linear layers, norms, attention). **alone**: the model attends in a way of its own, and the sequences of a step
are computed one after the other.

**refused**: the model cannot be served, or could not be proved, for the reason in the last column.

**At each load** the engine compares the model itself with the plain transformers model: the logits of one prompt must
agree, also when its cache is handed over and computed beside another sequence. The prompt is longer than the model's
windows, chunks and choices of an indexer (`index_topk`) of up to 512 tokens. Longer ones are proved for this page, with
small models whose windows are shorter than the prompts; the load logs their names. A model of a type that is not on
this page is served if the logits agree, and up to its shortest window that was proved neither way, with a warning.

A model that sees or hears is served for texts. No code of a model's authors is run, not even for its tokenizer.
Published weights were not loaded for this page, only configurations: `tools/configurations/` has each of them, and says
where it was read. One with * was rebuilt from the model's report and transformers' defaults.

## The most used

{make_usage_table(checkpoints)}
## Published checkpoints
{make_rows(checkpoints)}
{CONTEXT}
{QUANTISED}
{FILES}
{MIXTURES}
{STATES}
{ALONE}
## All architectures of transformers

{num_works} of the {len(verdicts)} causal-language-model architectures of transformers work in their default
configuration, by the same proof. A checkpoint may differ from the default.

{make_architectures(verdicts)}"""


def make_architectures(verdicts: list[Verdict]) -> str:
    """Return a line for the architectures that work, one for those that work as decoders, and one for each reason."""
    groups: dict[str, list[str]] = {}
    for verdict in verdicts:
        works = WORKS_AS_DECODER if verdict.architecture in AS_DECODER else WORKS
        groups.setdefault(verdict.reason or works, []).append(verdict.architecture)
    order = sorted(groups, key=lambda reason: (reason not in (WORKS, WORKS_AS_DECODER), -len(groups[reason])))
    return "\n".join(f"- **{reason}** {', '.join(groups[reason])}" for reason in order) + "\n"


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file: Path = parser.parse_args().file
    _silence_transformers()
    verdicts, checkpoints = [], []
    console = Console(stderr=True)
    for checkpoint in track(read_checkpoints().values(), "trying published checkpoints", console=console):
        checkpoints.append(judge_checkpoint(checkpoint))
        gc.collect()
    for architecture in track(ARCHITECTURES, "trying architectures", console=console):
        verdicts.append(judge_architecture(architecture))
        gc.collect()
    file.write_text(make_page(checkpoints, verdicts))
    lines = [f'"{kind}": {json.dumps(sorted(names))}' for kind, names in sorted(proved_windows.items()) if names]
    PROVED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    num_served = sum(verdict.is_served for verdict in checkpoints)
    console.print(f"{file}: {num_served} of {len(checkpoints)} published checkpoints are served")


def _silence_transformers() -> None:
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")


if __name__ == "__main__":
    main()
