"""The texts of single tokens."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from penstock.engine.model.model import LoadedModel
from penstock.engine.text.token_text import TokenTexts
from penstock.messages import MAX_TOKEN_BYTES, Logprobs, TokenLogprob


def spelled(texts: TokenTexts, token_id: int) -> bytes:
    text, spelling = texts.get_text(token_id)
    assert text is not None
    return text.encode() if spelling is None else bytes(spelling)


@given(text=st.text(min_size=1, max_size=40))
def test_tokens_of_bytes_add_up_to_the_text(demo: LoadedModel, text: str) -> None:
    texts = TokenTexts(demo.tokenizer)
    token_ids = demo.tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(spelled(texts, token_id) for token_id in token_ids).decode() == text


def test_a_part_of_a_character_has_its_bytes(demo: LoadedModel) -> None:
    texts = TokenTexts(demo.tokenizer)
    first, *_ = demo.tokenizer.encode("😀", add_special_tokens=False)
    text, spelling = texts.get_text(first)
    assert spelling is not None
    assert bytes(spelling) == "😀".encode()[: len(spelling)]
    assert text == bytes(spelling).decode(errors="replace")


def test_special_tokens_have_their_names_and_unknown_ids_nothing(demo: LoadedModel) -> None:
    texts = TokenTexts(demo.tokenizer)
    assert texts.get_text(demo.tokenizer.eos_token_id) == (demo.tokenizer.eos_token, None)
    assert texts.get_text(10**6) == (None, None)


def sentencepiece(*words: str) -> Any:
    names = ["<unk>", "a", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, [], unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=backend, unk_token="<unk>")


def test_a_space_before_a_word_stays_and_byte_tokens_are_bytes() -> None:
    texts = TokenTexts(sentencepiece("▁the", "é", "=" * (MAX_TOKEN_BYTES + 1)))
    assert texts.get_text(258) == (" the", None)
    assert texts.get_text(259) == ("é", None)
    assert texts.get_text(260) == (None, None), "too long for a result"
    assert texts.get_text(2 + 0xC3) == ("\ufffd", [0xC3])
    assert texts.get_text(2 + 0x0A) == ("\n", None)


def test_log_probabilities_are_filled_with_them(demo: LoadedModel) -> None:
    texts = TokenTexts(demo.tokenizer)
    the, king = (demo.tokenizer.encode(word, add_special_tokens=False)[0] for word in (" the", " king"))
    filled = texts.add_texts(Logprobs(logprob=-1.0, top=[TokenLogprob(token=king, logprob=-0.5)]), the)
    assert filled is not None
    assert (filled.text, filled.top[0].text) == (texts.get_text(the)[0], texts.get_text(king)[0])
    assert texts.add_texts(None, the) is None
