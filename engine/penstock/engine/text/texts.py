"""Texts to compute vectors of, as tokens of a model that the engine computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.vectors import TextRow, VectorCard
from penstock.engine.weights.modules import Checkpoint, find_around, find_end_tokens
from penstock.messages import EmbedOptions


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

    def read_texts(self, texts: Sequence[str], options: EmbedOptions) -> list[TextRow]:
        """Return the tokens of each text. Raises `InvalidRequest` or `PromptTooLong`."""
        self.card.check_texts(texts, options)
        prompt = self.card.find_prompt(options.prompt)
        room = self.card.max_length - len(self.start_ids) - len(self.end_ids)
        return [self._read_text(index, prompt + text, room, options.truncate) for index, text in enumerate(texts)]

    def _read_text(self, index: int, text: str, room: int, truncate: str | None) -> TextRow:
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if truncate is not None and len(ids) > room:
            ids = ids[:room] if truncate == "end" else ids[len(ids) - room :]
        row = [*self.start_ids, *ids, *self.end_ids]
        self.card.check_length(index, len(row) if ids else 0)
        return TextRow(row)


def make_text_reader(
    checkpoint: Checkpoint, tokenizer: Any, size: int, context_length: int, *, has_head: bool
) -> TextReader:
    """Return the reader of a checkpoint whose model says `size` numbers of a token. Raises `ModelLoadError`."""
    whole, bare = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    start_ids, end_ids = find_around(whole, bare)
    card = VectorCard(
        task="embed",
        size=size,
        max_length=min(context_length, checkpoint.max_length or context_length, tokenizer.model_max_length),
        pooling="lasttoken",
        prompts=checkpoint.prompts,
        default_prompt=checkpoint.about.get("default_prompt_name") or "",
        dimensions=checkpoint.list_dimensions(),
    )
    end_ids += find_end_tokens(checkpoint, tokenizer)
    return TextReader(card, tokenizer, checkpoint.normalizes, has_head, start_ids, end_ids)
