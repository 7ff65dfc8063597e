"""The texts of single tokens, which answers have beside log probabilities.

A token's text is what it is by itself, with the space it may begin with; a special token's is its name. Where a
tokenizer spells everything in bytes, a token may be a part of a character, or end with one: it has its bytes as well,
and a text with replacement characters.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from penstock.messages import MAX_TOKEN_BYTES, Logprobs, PromptToken, TokenLogprob

REPLACEMENT = "\ufffd"
"""The character that replaces bytes that are no character."""
TextAndBytes = tuple[str | None, list[int] | None]
"""Text and bytes, as `TokenLogprob` has them."""


class TokenTexts:
    """The texts of one tokenizer's tokens, cached."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
        decoder = _describe_decoder(tokenizer)
        self._bytes = _map_byte_letters() if '"ByteLevel"' in json.dumps(decoder) else {}
        self.is_joining_bytes = decoder.get("type") == "ByteLevel"
        """Whether a text is its tokens' bytes one after the other: no token is written in another way beside others."""
        anchors = tokenizer.encode("a", add_special_tokens=False)
        self._anchor = anchors[-1:]
        """A token to decode before others, because some tokenizers write the first token of a text differently."""
        self._anchor_text = self._decode_tokens(self._anchor)
        self._known: dict[int, TextAndBytes] = {}
        self._whole: dict[int, str | None] = {}

    def add_texts(self, told: Logprobs | None, token_id: int) -> Logprobs | None:
        """`told` of the chosen token `token_id`, with the texts of all its tokens."""
        if told is None:
            return None
        return Logprobs(logprob=told.logprob, top=self._add_top_texts(told), **self._make_fields(token_id))

    def describe_prompt(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> list[PromptToken]:
        """Return the tokens of a prompt with their texts. `logprobs` are those of all tokens but the first."""
        first = PromptToken(token=token_ids[0], **self._make_fields(token_ids[0]))
        others = [
            PromptToken(token=token, logprob=one.logprob, top=self._add_top_texts(one), **self._make_fields(token))
            for token, one in zip(token_ids[1:], logprobs, strict=True)
        ]
        return [first, *others]

    def _add_top_texts(self, told: Logprobs) -> list[TokenLogprob]:
        return [TokenLogprob(token=one.token, logprob=one.logprob, **self._make_fields(one.token)) for one in told.top]

    def get_text(self, token_id: int) -> TextAndBytes:
        """Return a token's text, and its bytes if these are no whole characters. (None, None) for an unknown id."""
        if token_id not in self._known:
            self._known[token_id] = self._find_text(token_id)
        return self._known[token_id]

    def find_whole_text(self, token_id: int) -> str | None:
        """Return what a token adds to any text; None where that depends on the tokens around it."""
        if token_id not in self._whole:
            text, spelling = self.get_text(token_id)
            is_whole = self.is_joining_bytes and token_id not in self._added and spelling is None
            self._whole[token_id] = text if is_whole and text is not None and REPLACEMENT not in text else None
        return self._whole[token_id]

    def _make_fields(self, token_id: int) -> dict[str, Any]:
        text, spelling = self.get_text(token_id)
        return {"text": text, "bytes": spelling}

    def _find_text(self, token_id: int) -> TextAndBytes:
        name = self._added.get(token_id)
        if name is None:
            name = self._tokenizer.convert_ids_to_tokens(token_id)
            if name is None:
                return None, None
            spelling = self._find_bytes(name)
            if spelling is None:
                name = self._decode_tokens([*self._anchor, token_id])[len(self._anchor_text) :]
            else:
                name = spelling.decode(errors="replace")
                if name.encode() != spelling:
                    return name, list(spelling)
        return (name, None) if len(name.encode()) <= MAX_TOKEN_BYTES else (None, None)

    def _find_bytes(self, name: str) -> bytes | None:
        """Return the bytes that a token's name stands for, or None."""
        if self._bytes:
            letters = [self._bytes.get(letter) for letter in name]
            return None if None in letters else bytes(letter for letter in letters if letter is not None)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return None

    def _decode_tokens(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


@lru_cache(maxsize=4)
def get_token_texts(tokenizer: Any) -> TokenTexts:
    """Return the texts of a tokenizer's tokens, shared by all requests."""
    return TokenTexts(tokenizer)


def _describe_decoder(tokenizer: Any) -> dict[str, Any]:
    """Return a tokenizer's decoder as its file has it; empty where it has none."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return {} if decoder is None else dict(json.loads(decoder.__getstate__()))


def _map_byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies: itself where it can be seen, else one of those
    after the 256th.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(unseen)}
