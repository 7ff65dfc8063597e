"""A model for vectors or scores, computed by sentence-transformers: reads texts, and computes batches of them.

The library's own modules compute, so that vectors are the ones that it would give. The batches are ours: a batch has
texts of about one length, as many as make `batch_tokens` tokens, and so little padding.
"""

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch import Tensor

from penstock.config.settings import EngineSettings
from penstock.engine.loading.vector_files import Checkpoint, find_end_tokens
from penstock.engine.vectors import Floats, TextRow, VectorCard
from penstock.errors import ModelLoadError, choose_load_error
from penstock.messages import EmbedOptions, Text

BATCH_TOKENS, GPU_BATCH_TOKENS = 1024, 16384
"""The most tokens of a batch with its padding, on a CPU and on a GPU; a longer text is a batch of its own."""


class EmbedModel:
    """A model for vectors (`task` is `embed`) or for scores. Any thread may read texts; one computes at a time."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings, default_prompt: str | None = None) -> None:
        """Load a checkpoint that passed. `default_prompt` is the name of the prompt of requests that name none.

        Raise `ModelLoadError` where the libraries refuse it.
        """
        self.checkpoint, self.task = checkpoint, checkpoint.task
        device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        is_on_cpu = device == "cpu"
        self.batch_tokens = BATCH_TOKENS if is_on_cpu else GPU_BATCH_TOKENS
        if is_on_cpu:
            torch.set_num_threads(settings.num_threads)
        dtype = "float32" if settings.dtype == "auto" and is_on_cpu else settings.dtype
        library: Any = SentenceTransformer if self.task == "embed" else CrossEncoder
        try:
            self._model: Any = library(
                str(checkpoint.directory),
                device=device,
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"dtype": dtype, "use_safetensors": True},
            )
        except Exception as error:
            raise choose_load_error(error)(f"sentence-transformers cannot load it: {error}") from error
        self._model.eval()
        self._tokenizer: Any = self._model.tokenizer
        self._lock = threading.Lock()
        """Held while texts are read: how the tokenizer cuts is a state of its own."""
        self.pooling = self._find_pooling()
        self._end_ids = find_end_tokens(checkpoint, self._tokenizer) if self.pooling == "lasttoken" else []
        self.card = VectorCard(
            task=self.task,
            size=self._find_size(),
            max_length=self._find_max_length(),
            vocab_size=self._find_vocab_size(),
            pooling=self.pooling,
            prompts={name: text or "" for name, text in self._model.prompts.items()},
            default_prompt=default_prompt or self._model.default_prompt_name or "",
            dimensions=None if self.task == "score" else checkpoint.list_dimensions(),
        )

    def describe_model(self) -> dict[str, Any]:
        """Return what the heartbeat says of the model beside its names."""
        return {"max_model_len": self.card.max_length, "task": self.task, **self.card.describe_card()}

    # Reading

    def read_texts(self, texts: Sequence[Text], options: EmbedOptions) -> list[TextRow]:
        """Return the tokens of each text; token ids as they are. Raise `InvalidRequest` or `PromptTooLong`."""
        self.card.check_texts(texts, options)
        prompt, strings = self.card.find_prompt(options.prompt), [text for text in texts if isinstance(text, str)]
        inputs = strings if options.query is None else [(options.query, text) for text in strings]
        read = iter(self._tokenize(inputs, prompt, options.truncate) if inputs else ())
        return [
            self._end_row(index, next(read)) if isinstance(text, str) else self._read_ids(index, text, options.truncate)
            for index, text in enumerate(texts)
        ]

    def _tokenize(
        self, inputs: Sequence[Any], prompt: str, truncate: Literal["start", "end"] | None = None
    ) -> list[TextRow]:
        """Return the tokens of texts or pairs as the library has them."""
        room = self.card.max_length - len(self._end_ids)
        cutting = {"truncation": "longest_first", "max_length": room} if truncate else {"truncation": False}
        with self._lock:
            side, self._tokenizer.truncation_side = (
                self._tokenizer.truncation_side, {"start": "left", "end": "right"}[truncate or "end"],
            )  # fmt: skip
            try:
                found = self._model.preprocess(
                    inputs,
                    prompt=prompt or None,
                    processing_kwargs={"text": {**cutting, "padding": False}, "common": {"return_tensors": None}},
                )
            finally:
                self._tokenizer.truncation_side = side
        rows, types = found.pop("input_ids"), found.pop("token_type_ids", None)
        shared = {name: value for name, value in found.items() if name != "attention_mask"}
        return [TextRow(ids, None if types is None else types[index], shared) for index, ids in enumerate(rows)]

    def _end_row(self, index: int, row: TextRow) -> TextRow:
        ids, types, num_end = row.token_ids, row.type_ids, len(self._end_ids)
        end = self._end_ids if num_end and ids[-num_end:] != self._end_ids else []
        self.card.check_length(index, len(ids) + len(end) if ids else 0)
        return TextRow([*ids, *end], None if types is None else [*types, *types[-1:] * len(end)], row.shared)

    @cached_property
    def _plain_row(self) -> TextRow:
        """A text without a prompt: what else it tells the modules, token ids tell them too."""
        return self._tokenize(["a"], "")[0]

    def _read_ids(self, index: int, ids: Sequence[int], truncate: str | None) -> TextRow:
        row, plain = self.card.fit_ids(index, ids, truncate), self._plain_row
        return TextRow(row, None if plain.type_ids is None else plain.type_ids[:1] * len(row), plain.shared)

    # Computing

    @torch.inference_mode()
    def compute_rows(self, rows: Sequence[TextRow]) -> Floats:
        """Return the numbers of each row. Raise what the libraries raise."""
        width = max(map(len, rows))
        fill = self._tokenizer.pad_token_id or 0
        features: dict[str, Any] = {
            "input_ids": self._pad([row.token_ids for row in rows], width, fill),
            "attention_mask": self._pad([[1] * len(row) for row in rows], width, 0),
        }
        if rows[0].type_ids is not None:
            fill = self._tokenizer.pad_token_type_id
            features["token_type_ids"] = self._pad([row.type_ids or [] for row in rows], width, fill)
        found = self._model({**rows[0].shared, **features})
        if self.task == "embed":
            numbers: Tensor = found["sentence_embedding"].float()[:, : self._model.truncate_dim]
        else:
            numbers = self._model.activation_fn(found["scores"].float()).reshape(len(rows), 1)
        return np.ascontiguousarray(numbers.cpu().numpy(), dtype="<f4")

    def _pad(self, rows: Sequence[list[int]], width: int, fill: int) -> Tensor:
        is_left = self._tokenizer.padding_side == "left"
        made = [[fill] * (width - len(row)) + row if is_left else row + [fill] * (width - len(row)) for row in rows]
        return torch.tensor(made, dtype=torch.long, device=self._model.device)

    # What the checkpoint says

    def _find_pooling(self) -> str:
        modes = [getattr(module, "pooling_mode", None) for module in self._model]
        found = [mode if isinstance(mode, str) else "+".join(mode) for mode in modes if mode is not None]
        return found[0] if found else ""

    def _find_size(self) -> int:
        if self.task == "embed":
            return int(self._model.truncate_dim or self._model.get_embedding_dimension())
        if self._model.num_labels != 1:
            raise ModelLoadError(f"it tells {self._model.num_labels} classes apart, and a score is one number")
        return 1

    def _find_vocab_size(self) -> int:
        """Return how many token ids it knows; 0 where its embedding does not say, so that it takes texts alone."""
        try:
            return int(self._model[0].model.get_input_embeddings().num_embeddings)
        except (AttributeError, NotImplementedError):
            return 0

    def _find_max_length(self) -> int:
        """Return how many tokens a text may have: what the checkpoint says, and no more than it has positions for."""
        tables = [one for name, one in self._model.named_modules() if name.endswith("position_embeddings")]
        places: list[Any] = [
            one.num_embeddings - (0 if one.padding_idx is None else one.padding_idx + 1)
            for one in tables
            if isinstance(one, torch.nn.Embedding)
        ]
        said = [self._model.max_seq_length, *(places or [getattr(self._model.config, "max_position_embeddings", None)])]
        return min((int(one) for one in said if one), default=2**31 - 1)
