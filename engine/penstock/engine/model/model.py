"""A loaded model, and what computes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from penstock.config.settings import EngineSettings
from penstock.engine.memory.storage import BlockLayout, KVStorage
from penstock.engine.pictures.reader import PictureReader
from penstock.engine.pictures.vision import Vision
from penstock.engine.steps.latent import LatentHeads
from penstock.engine.steps.native_step import NativeParts
from penstock.engine.steps.runner import ModelRunner
from penstock.engine.vectors import TextReader
from penstock.engine.weights.fingerprint import add_arithmetic
from penstock.engine.weights.weights import MappedWeights

QUANTIZATION_VERSION = 4
"""Counts the changes of what a weight or an input becomes in 8 or 4 bits; part of the fingerprint."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for the engine."""

    name: str
    config: Any
    tokenizer: Any
    response_template: dict[str, Any] | None
    """The template by which calls and reasoning are told from an answer's text."""
    context_length: int
    """Most tokens, prompt and output together."""
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    content_fingerprint: str
    """Hex digest of weights, configuration, dtype and KV layout."""
    module: Any
    """The transformers model."""
    layout: BlockLayout
    vocab_size: int
    """Token ids are below this."""
    stock_attention: str
    """The attention implementation transformers would use."""
    text_reader: TextReader | None = None
    """Reads texts, if the model computes vectors of them."""
    picture_reader: PictureReader | None = None
    """Reads pictures, if the model sees, and is to."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """There are none: this engine computes no adapters."""
    native: NativeParts | None = None
    """The parts that the native kernels compute, chosen when it is loaded. None if it runs on torch's operators."""
    device_name: str = ""
    """The name of a GPU with the versions of its libraries, on which rounding depends; empty for a CPU."""
    dtype_reason: str = ""
    """Why it is computed in `dtype`."""
    weight_form: str = ""
    """`int8` or `int4` where the weights were made integers, `gguf` where they are the integers of a GGUF file; empty:
    they are as they are stored."""
    stage_forms: tuple[str, str] | None = None
    """The forms of the weights that compute prompts, and answers, if those are not the same: one is `weight_form`."""
    prompt_model: "LoadedModel | None" = None
    """The model that computes prompts, where this one computes answers alone. Both write to one pool."""
    weights: MappedWeights = field(default_factory=lambda: MappedWeights([]))
    """The files that its parameters may be views of. Call `drop_tensor_pages` after copying a parameter."""

    @cached_property
    def vision(self) -> Vision | None:
        """Its part that sees pictures, where it has a `picture_reader`."""
        return None if self.picture_reader is None else Vision((self.prompt_model or self).module, self.stock_attention)

    @property
    def backend_name(self) -> str:
        """The name of the backend: in 16 bits, models with other names may round otherwise."""
        if self.native is not None:
            return self.native.name
        return f"torch {self.device_name or torch.backends.cpu.get_cpu_capability()}"

    def create_runner(self, settings: EngineSettings, num_blocks: int, num_states: int = 1) -> ModelRunner:
        """Return a runner over a new pool of KV blocks, and rows for so many states."""
        if self.native is None:
            assert not self.layout.is_int8, "torch's attention reads K and V in the model's dtype"
            torch.set_num_threads(settings.num_threads)
        else:
            torch.set_num_threads(1)  # torch's threads would spin beside those of the kernels
            self.native.library.set_threads(settings.num_threads)
        if self.vision is not None:
            self.vision.num_threads = settings.num_threads
        return ModelRunner(self.module, KVStorage(self.layout, num_blocks, self.device, num_states), self.native)

    @property
    def has_separate_answer_keys(self) -> bool:
        """Whether a token's KV depends on whether it is the prompt's or the answer's.

        Weights in another form compute another KV. Attention to latents rounds otherwise than attention to the K and V
        made of them, which only in float32 is too little to change a token.
        """
        return self.stage_forms is not None or (
            self._is_rounded and any(isinstance(part, LatentHeads) for part in self.module.modules())
        )

    @property
    def _is_rounded(self) -> bool:
        """Whether small differences of sums become large ones: in 16 bits, and where numbers become integers."""
        return bool(
            self.dtype != torch.float32 or self.layout.is_int8 or self.weight_form or self.stage_forms is not None
        )

    @property
    def is_batch_invariant(self) -> bool:
        """Whether tokens follow from the request alone: torch rounds sums by what is computed beside them."""
        return not self._is_rounded or (self.native is not None and self.native.body is not None)

    @property
    def arithmetic(self) -> str:
        """How numbers are rounded, in words. Models of the same weights and words give the same tokens."""
        words = [str(self.dtype).removeprefix("torch.")]
        if self.stage_forms is not None:
            prompts, answers = (form or "as they are stored" for form in self.stage_forms)
            words.append(f"weights of prompts {prompts}, of answers {answers} (version {QUANTIZATION_VERSION})")
        elif self.weight_form:
            words.append(f"weights in {self.weight_form} (version {QUANTIZATION_VERSION})")
        words += ["KV in int8"] if self.layout.is_int8 else []
        return ", ".join(words) + (f" on {self.backend_name}" if self._is_rounded else "")

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of content, form of weights and backend: if equal, KV blocks can be exchanged.

        The backend counts where small differences become large ones (`_is_rounded`).
        """
        name = self.content_fingerprint
        if self.stage_forms is not None:
            prompts, answers = self.stage_forms
            name = add_arithmetic(name, f"prompts {prompts}, answers {answers} {QUANTIZATION_VERSION}")
        elif self.weight_form:
            name = add_arithmetic(name, f"{self.weight_form} {QUANTIZATION_VERSION}")
        return add_arithmetic(name, self.backend_name) if self._is_rounded else name
