"""Which published checkpoints and which architectures of transformers the engine serves, found by trying all of them.

`python -m tools.compatibility docs/models.md` builds a tiny random model from each configuration, proves it next to
`generate()` (`proof.py`), and writes the page's tables, and which windows were proved (`engine/proved.json`).
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
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading.probe import check_config, probe_layout
from penstock.engine.loading.windows import PROVED, find_windows
from penstock.engine.memory.storage import BlockLayout
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.layer import NativeLayer
from penstock.engine.model.model import LoadedModel
from penstock.engine.weights.module import build_skeleton
from penstock.errors import EngineCheckFailed, ModelLoadError
from tools.compatibility_cases import AS_DECODER, CHECKPOINT_REASONS, KEYWORDS, REASONS, SIZES
from tools.handover import export_blocks, export_state
from tools.proof import (
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
SEEING = tuple(sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - {*ARCHITECTURES}))
"""Those of models that also see, and have no class for their text alone."""
CONTEXT_TOKENS = 128
NUM_SEEDS = 5
_CPU = torch.device("cpu")

WORKS = "Work:"
WORKS_AS_DECODER = "Work as decoders, if their configuration says `is_decoder`:"
WHOLE = "Whole: one call computes the decoder."
HAS_WINDOWS = "Layers: a window ends what a token sees."
HAS_MIXTURES = "Layers: PyTorch computes rows of their mixtures of experts otherwise beside others."
HAS_OTHER_LAYERS = "Parts: a layer is built otherwise than Llama's, such as by other norms, attention or states."
NOT_TRIED = "Not tried: no small model could be made of the default configuration."


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


def judge_seeing(architecture: str) -> tuple[str, str]:
    """Return an architecture of a model that also sees, and what the kernels compute of it, or why it is refused."""
    try:
        model = _prove_architecture(architecture)
    except CannotShrink:
        return architecture, NOT_TRIED
    except EngineCheckFailed:
        return architecture, "Not equal: a small model gives other tokens than `generate()`."
    except ModelLoadError as error:
        reason = REASONS.get(architecture) or _make_sentence(error)
        return architecture, f"Refused: {reason[0].lower()}{reason[1:]}"
    kernels = _describe_kernels(model)
    if kernels == "layers":
        return architecture, HAS_WINDOWS if "sliding_window" in find_windows(model.config) else HAS_MIXTURES
    return architecture, WHOLE if kernels == "whole" else HAS_OTHER_LAYERS


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


def _prove_architecture(architecture: str) -> LoadedModel:
    try:
        config = CONFIG_MAPPING[architecture](**KEYWORDS.get(architecture, {}))
    except Exception as error:
        raise CannotShrink(f"no model can be made of its default configuration: {error}") from error
    check_config(config)
    auto: Any = AutoModelForImageTextToText if architecture in SEEING else AutoModelForCausalLM
    kind = auto._model_mapping[type(config)]  # noqa: SLF001 - as its `from_config` does
    if kind.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    return _prove_config(kind, shrink_config(config, SIZES.get(architecture)))


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


def update_page(
    page: str, checkpoints: list[CheckpointVerdict], verdicts: list[Verdict], seeing: list[tuple[str, str]]
) -> str:
    """Return docs/models.md with what was found out now; what else the page says stays."""
    sections = {
        "# Models": make_summary(checkpoints),
        "## The most used": make_usage_table(checkpoints),
        "## Published checkpoints": make_rows(checkpoints).removeprefix("\n"),
        "## All architectures of transformers": make_architectures(verdicts),
        "## Architectures that also see": make_seeing(seeing),
    }
    for heading, text in sections.items():
        begin, rest = page.split(f"{heading}\n", 1)
        _, mark, after = rest.partition("\n## ")
        page = f"{begin}{heading}\n\n{text}{mark}{after}"
    return page


def make_summary(verdicts: list[CheckpointVerdict]) -> str:
    """Return how many checkpoints are served, and with which libraries that was found out."""
    num_served = sum(verdict.is_served for verdict in verdicts)
    return f"""\
Does a model run? Look for its name below. **{num_served} of {len(verdicts)} published checkpoints** give
the tokens of transformers' `generate()`. `python -m tools.compatibility docs/models.md` writes the tables of this page;
it did so with transformers {transformers.__version__}, torch {torch.__version__.partition("+")[0]} and Python
{platform.python_version()}, in float32 on a CPU.
"""


def make_architectures(verdicts: list[Verdict]) -> str:
    """Return how many architectures work, and a line for those, one for those that work as decoders, and one for each
    reason.
    """
    num_works = sum(verdict.works for verdict in verdicts)
    groups: dict[str, list[str]] = {}
    for verdict in verdicts:
        works = WORKS_AS_DECODER if verdict.architecture in AS_DECODER else WORKS
        groups.setdefault(verdict.reason or works, []).append(verdict.architecture)
    order = sorted(groups, key=lambda reason: (reason not in (WORKS, WORKS_AS_DECODER), -len(groups[reason])))
    lines = "\n".join(f"- **{reason}** {', '.join(groups[reason])}" for reason in order)
    return f"""\
{num_works} of the {len(verdicts)} causal-language-model architectures of transformers work in their default
configuration, by the same proof. A checkpoint may differ from the default.

{lines}
"""


def make_seeing(verdicts: list[tuple[str, str]]) -> str:
    """Return a line for each kind of computation, and for each reason why a model that also sees is refused."""
    groups: dict[str, list[str]] = {}
    for architecture, group in verdicts:
        groups.setdefault(group, []).append(architecture)
    first = (WHOLE, HAS_WINDOWS, HAS_MIXTURES, HAS_OTHER_LAYERS)
    num_whole, num_served = len(groups.get(WHOLE, ())), sum(len(groups.get(group, ())) for group in first)
    order = sorted(groups, key=lambda group: (first.index(group) if group in first else len(first), group))
    lines = "\n".join(f"- **{group}** {', '.join(groups[group])}" for group in order)
    return f"""\
{num_served} of the {len(verdicts)} further architectures of transformers that see work for texts in their default
configuration, by the same proof; the native kernels compute the whole decoder of {num_whole}.

{lines}
"""


def main() -> None:
    """Write the tables of the page."""
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
    seeing = [judge_seeing(one) for one in track(SEEING, "trying those that also see", console=console)]
    file.write_text(update_page(file.read_text(), checkpoints, verdicts, seeing))
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
