"""Texts of which vectors or scores are computed: their tokens, what a model says of them, and how far a request is.

The worker's `EmbedEngine` computes them with sentence-transformers, and `ServingEngine` with the engine's own model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import InvalidRequest, ModelError, ModelLoadError, PromptTooLong
from penstock.messages import MAX_VECTOR_FLOATS, EmbedOptions, EmbedTask, Logprobs, Text, Usage, Vectors
from penstock.names import PriorityClass

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, eq=False, slots=True)
class TextRow:
    """The tokens of a text, or of a query with a text."""

    token_ids: list[int]
    type_ids: list[int] | None = None
    """The segment of each token, if the model tells them apart."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """What else the modules are told. Rows of one batch have it alike."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class VectorCard:
    """What a model says of the vectors or scores that it computes, and what it refuses."""

    task: EmbedTask
    size: int
    """How many numbers a text has, unless the request says; 1 for a score."""
    max_length: int
    """The most tokens of a text."""
    vocab_size: int
    pooling: str
    prompts: Mapping[str, str]
    """The texts that may be put before a text, by name."""
    default_prompt: str
    """The name of the prompt of requests that name none; empty: none."""
    dimensions: Sequence[int] | None = None
    """The lengths to which vectors may be cut; empty where any will do, None where none."""

    def __post_init__(self) -> None:
        if self.default_prompt and self.default_prompt not in self.prompts:
            raise ModelLoadError(f"it has no prompt {self.default_prompt!r}: {self._list_prompts()}")

    def describe_card(self) -> dict[str, Any]:
        """Return what the heartbeat says of it beside its task and longest text."""
        return {
            "dimensions": self.size,
            "matryoshka": self.dimensions,
            "pooling": self.pooling,
            "prompts": {name: text for name, text in self.prompts.items() if text},
            "default_prompt": self.default_prompt,
        }

    def check_texts(self, texts: Sequence[Text], options: EmbedOptions) -> None:
        """Raise `InvalidRequest` for a request that this model cannot compute."""
        if self.task == "embed" and options.query is not None:
            raise InvalidRequest("query: this pipeline's model computes vectors, ask one with a reranker for scores")
        if self.task == "score" and options.query is None:
            raise InvalidRequest("query is missing: this pipeline's model scores texts by one, and has no vectors")
        dimensions = options.dimensions
        if dimensions not in (None, self.size):
            if self.dimensions is None:
                raise InvalidRequest(f"dimensions: this model's vectors have {self.size}, and may not be cut")
            assert dimensions is not None
            if dimensions > self.size or (self.dimensions and dimensions not in self.dimensions):
                given = ", ".join(map(str, self.dimensions)) or f"1 to {self.size}"
                raise InvalidRequest(f"dimensions: this model's vectors may be cut to {given}, not to {dimensions}")
        if (num := len(texts) * (dimensions or self.size)) > MAX_VECTOR_FLOATS:
            raise InvalidRequest(f"{num:,} numbers are more than an answer may have, {MAX_VECTOR_FLOATS:,}: send less")
        for index, text in enumerate((*texts, options.query or "query")):
            if not text or (isinstance(text, str) and "\0" in text):
                whose = f"texts[{index}]" if index < len(texts) else "embed.query"
                raise InvalidRequest(f"{whose} {'is empty' if not text else 'has a NUL character: leave it out'}")
            if not isinstance(text, str):
                self._check_ids(index, text, options)

    def _check_ids(self, index: int, ids: Sequence[int], options: EmbedOptions) -> None:
        """Raise `InvalidRequest` for token ids in place of a text that this model cannot read."""
        if options.query is not None:
            raise InvalidRequest(f"texts[{index}]: token ids have no score by a query: send the text")
        if options.prompt:
            raise InvalidRequest(f"prompt: token ids are read as they are: put the ids of {options.prompt!r} before")
        if (place := next((at for at, one in enumerate(ids) if one >= self.vocab_size), None)) is not None:
            raise InvalidRequest(
                f"texts[{index}][{place}]: the model has no token {ids[place]}: its vocabulary has {self.vocab_size:,}"
            )

    def find_prompt(self, name: str | None) -> str:
        """Return the text of a prompt, or of the default one. Raises `InvalidRequest`."""
        name = self.default_prompt if name is None else name
        if name and name not in self.prompts:
            raise InvalidRequest(f"prompt: this model has no {name!r}: {self._list_prompts()}")
        return self.prompts[name] if name else ""

    def check_length(self, index: int, num_tokens: int) -> None:
        """Raise `PromptTooLong` for a text that the model cannot read, and `InvalidRequest` for one without tokens."""
        if num_tokens == 0:
            raise InvalidRequest(f"texts[{index}] has no tokens")
        if num_tokens > self.max_length:
            raise PromptTooLong(
                f"texts[{index}] has {num_tokens:,} tokens, and the model reads {self.max_length:,}: send "
                "less, or say by `truncate` where it is cut (start or end)"
            )

    def fit_ids(
        self, index: int, ids: Sequence[int], truncate: str | None, start: Sequence[int] = (), end: Sequence[int] = ()
    ) -> list[int]:
        """Return the token ids of a text, cut where it says so, between those around it. Raises as `check_length`."""
        room = self.max_length - len(start) - len(end)
        if truncate is not None and len(ids) > room:
            ids = ids[:room] if truncate == "end" else ids[len(ids) - room :]
        row = [*start, *ids, *end]
        self.check_length(index, len(row) if ids else 0)
        return row

    def _list_prompts(self) -> str:
        named = sorted(name for name, text in self.prompts.items() if text)
        return f"its prompts are {', '.join(named)}" if named else "it has none"


@dataclass(frozen=True, eq=False)
class TextReader:
    """Reads texts for a model whose vectors are what it says of their last tokens. Any thread may call it."""

    card: VectorCard
    tokenizer: Any
    normalizes: bool
    """Whether vectors get a length of 1."""
    has_head: bool
    """Whether the model generates text as well."""
    start_ids: Sequence[int]
    end_ids: Sequence[int]
    """The tokens around each text."""

    def read_texts(self, texts: Sequence[Text], options: EmbedOptions) -> list[TextRow]:
        """Return the tokens of each text; token ids as they are. Raises `InvalidRequest` or `PromptTooLong`."""
        self.card.check_texts(texts, options)
        prompt = self.card.find_prompt(options.prompt)
        return [self._read_text(index, text, prompt, options.truncate) for index, text in enumerate(texts)]

    def _read_text(self, index: int, text: Text, prompt: str, truncate: str | None) -> TextRow:
        if not isinstance(text, str):
            return TextRow(self.card.fit_ids(index, text, truncate))
        ids = list(self.tokenizer(prompt + text, add_special_tokens=False)["input_ids"])
        return TextRow(self.card.fit_ids(index, ids, truncate, self.start_ids, self.end_ids))


@dataclass(eq=False)
class TextRequest:
    """A request whose texts are computed, and how far that is (`SequenceProgress`)."""

    id: str
    rows: Sequence[TextRow]
    options: EmbedOptions
    priority_class: PriorityClass
    context: Any
    """The caller's, which events return unchanged."""
    found: dict[int, Floats] = field(default_factory=dict)
    """The numbers of each row that was computed."""
    num_cached_tokens = num_retained_blocks = 0
    prompt_logprobs: Sequence[Logprobs] = ()

    def __post_init__(self) -> None:
        self.num_prompt_tokens = sum(map(len, self.rows))

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the rows that were computed."""
        return sum(len(self.rows[index]) for index in list(self.found))

    @property
    def num_pending_tokens(self) -> int:
        """Tokens of the other rows."""
        return self.num_prompt_tokens - self.num_computed_tokens

    @property
    def is_waiting(self) -> bool:
        """Whether nothing of it was computed."""
        return not self.found

    @property
    def is_done(self) -> bool:
        """Whether each row has its numbers."""
        return len(self.found) == len(self.rows)

    @property
    def usage(self) -> Usage:
        """The tokens of its texts."""
        return Usage(prompt_tokens=self.num_prompt_tokens, cached_tokens=self.num_cached_tokens)

    def pack_vectors(self) -> Vectors:
        """Return the numbers of all rows. Raises `ModelError` where one of these is none."""
        numbers = np.stack([self.found[index] for index in range(len(self.rows))])
        cut = cut_vectors(numbers, self.options.dimensions)
        if wrong := [index for index, vector in enumerate(cut) if not np.isfinite(vector).all()]:
            raise ModelError(f"the model's numbers for texts[{wrong[0]}] are not finite")
        return Vectors.pack_floats(cut.tobytes(), cut.shape[1])


def cut_vectors(numbers: Floats, dimensions: int | None) -> Floats:
    """Return the leading numbers of each vector, with a length of 1 again if any are left out."""
    if dimensions is None or dimensions >= numbers.shape[1]:
        return numbers
    return normalize_vectors(numbers[:, :dimensions])


def normalize_vectors(numbers: Floats) -> Floats:
    """Return vectors with a length of 1."""
    lengths = np.linalg.norm(numbers, axis=1, keepdims=True)
    return np.ascontiguousarray(numbers / np.maximum(lengths, np.float32(1e-12)), dtype="<f4")
