from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.engine.model.model import LoadedModel
from penstock.engine.text.detokenizer import Detokenizer
from penstock.grammar.tools import ConstrainedCalls
from penstock.messages import FinishReason, GrammarSpec, Sampling
from sim.workload import TOOL_MODEL

EOS = frozenset({1})


@pytest.fixture(scope="module")
def tokenizer(demo: LoadedModel) -> Any:
    return demo.tokenizer


@pytest.fixture(scope="module")
def tool_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOOL_MODEL)


WORDS = ["a", "b", "ab", "▁", "▁a", "▁the", "é", "\ufffd"]
"""What the tokenizers with byte fallback have tokens for, after 3 special and 256 byte tokens."""
DECODERS: dict[str, Any] = {
    "llama": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]),
}


@pytest.fixture(scope="module", params=DECODERS)
def sentencepiece(request: pytest.FixtureRequest) -> Any:
    """A tokenizer that spells what it does not know in bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {name: number for number, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab, [("a", "b"), ("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.decoder = DECODERS[request.param]
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def _bytes(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def _push_all(
    tokenizer: Any, tokens: list[int], **sampling: Any
) -> tuple[list[str], list[FinishReason | None], Detokenizer]:
    state = Detokenizer(tokenizer, Sampling(**sampling), EOS, sampling.get("max_tokens", len(tokens) + 1))
    texts: list[str] = []
    reasons: list[FinishReason | None] = []
    for token in tokens:
        text, reason = state.add_token(token)
        texts.append(text)
        reasons.append(reason)
        if reason is not None:
            break
    return texts, reasons, state


@given(tokens=st.lists(st.integers(0, 1023), min_size=1, max_size=120), at_length=st.booleans())
def test_any_tokens_come_out_as_they_decode_at_once(tokenizer: Any, tokens: list[int], at_length: bool) -> None:
    limit = {"max_tokens": len(tokens)} if at_length else {}
    texts, reasons, state = _push_all(tokenizer, tokens, ignore_eos=True, **limit)
    whole = "".join(texts) + ("" if at_length else state.take_rest())
    assert whole == tokenizer.decode(tokens, skip_special_tokens=True)
    assert reasons[-1] == ("length" if at_length else None)
    assert state.take_rest() == ""


@given(tokens=st.lists(st.integers(0, 1023), min_size=1, max_size=40))
@example(tokens=[0xE4 + 3] * 5)
def test_each_token_adds_what_cannot_change_any_more(tokenizer: Any, tokens: list[int]) -> None:
    texts, _, _ = _push_all(tokenizer, tokens, ignore_eos=True)
    so_far = ""
    for number, text in enumerate(texts, 1):
        so_far += text
        whole = tokenizer.decode(tokens[:number], skip_special_tokens=True)
        num_open = len(whole) - len(whole.rstrip("\ufffd"))
        assert so_far == whole[: max(len(so_far) - len(text), len(whole) - min(num_open, 3))]


def test_the_stop_string_that_ended_the_output_is_known(tokenizer: Any) -> None:
    tokens = tokenizer.encode("In the beginning", add_special_tokens=False)
    assert _push_all(tokenizer, tokens, stop=["ginn", "the b", "In  "])[2].stop == "the b"
    assert _push_all(tokenizer, tokens, stop=["never"])[2].stop is None


@given(text=st.text("aé€😀", min_size=1, max_size=30))
def test_no_character_comes_in_halves(tokenizer: Any, text: str) -> None:
    texts, _, _ = _push_all(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert not any("\ufffd" in piece for piece in texts)


@given(
    text=st.text("abcé ", min_size=1, max_size=40),
    stops=st.lists(st.text("abcé ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_cut_wherever_the_tokens_end(tokenizer: Any, text: str, stops: list[str]) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    texts, reasons, state = _push_all(tokenizer, tokens, stop=stops)
    text_so_far = "".join(texts)
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    if found:
        assert reasons[-1] == "stop"
        assert not any(stop in text_so_far for stop in stops)
        assert text.startswith(text_so_far)
        # Tokens that came later could have brought an earlier match only if they were not pushed any more.
        assert any(text[len(text_so_far) :].startswith(stop) for stop in stops)
    else:
        assert reasons[-1] is None
        assert text_so_far + state.take_rest() == text


@pytest.mark.parametrize(
    ("letters", "sampling", "texts", "reason"),
    [
        ("xabz", {"stop": ["abc"]}, "x|||abz", None),  # what may be a stop string is held back, and let go
        ("xab", {"stop": ["abc"], "max_tokens": 3}, "x||ab", "length"),
        ("a$", {"stop": ["ab"]}, "|a", "stop"),  # the end of sequence adds no text
        ("a$a", {"ignore_eos": True}, "a||a", None),
        ("aba", {"stop_token_ids": "b"}, "a|", "stop"),
        ("a$", {"max_tokens": 2}, "a|", "stop"),  # both at once: it has come to its end
        ("ababc", {"stop": ["ab"], "min_tokens": 2}, "|ab||", "stop"),  # one that ends within min_tokens is none
        ("cabc", {"stop": ["ab"], "min_tokens": 2}, "c||", "stop"),  # it begins within them and ends after them
        ("abac", {"stop": ["ab", "bac"], "min_tokens": 3}, "||a|", "stop"),
    ],
)
def test_what_stops_an_answer_and_what_is_held_back(
    tokenizer: Any, letters: str, sampling: dict[str, Any], texts: str, reason: FinishReason | None
) -> None:
    """`$` is the end of sequence. The texts of the tokens are parted by `|`."""

    def encode(text: str) -> list[int]:
        return [1 if c == "$" else tokenizer.encode(c, add_special_tokens=False)[-1] for c in text]

    given = {**sampling, "stop_token_ids": encode(sampling.get("stop_token_ids", ""))}
    found, reasons, _ = _push_all(tokenizer, encode(letters), **given)
    assert "|".join(found) == texts
    assert reasons[-1] == reason


def test_within_a_held_call_nothing_stops(tool_tokenizer: Any) -> None:
    """Stop strings and stop tokens end the answer before a call and after it, and not from its mark to its mark."""
    call = '<tool_call>{"name": "f", "arguments": {"a": "END"}}</tool_call>'
    held = ConstrainedCalls("<tool_call>", "</tool_call>", "", "", (), is_required=False, is_parallel=True).make_spec()

    def push(text: str, grammar: GrammarSpec | None = held, **sampling: Any) -> tuple[str, FinishReason | None, int]:
        tokens = tool_tokenizer.encode(text, add_special_tokens=False)
        given = {"special_text": True, "grammar": grammar, **sampling}
        texts, reasons, _ = _push_all(tool_tokenizer, tokens, **given)
        return "".join(texts), reasons[-1], len(tokens) - len(texts)

    assert push(f"{call}{call}", stop=["END", "a", "}}<", "</tool_call>"]) == (call + call, None, 0)
    assert push(f"Now{call}END", stop=["END"]) == (f"Now{call}", "stop", 0)
    assert push(f"{call}ow", stop=[">o"]) == (f"{call}ow", None, 0), "a stop string that begins in the call is none"
    assert push(f"EN{call}", stop=["EN<", "END"]) == (f"EN{call}", None, 0), "nor is one that ends in it"
    assert push(f"an END{call}", stop=["END"])[:2] == ("an ", "stop")
    assert push(call, None, stop=["END"])[:2] == (call.partition("END")[0], "stop"), "a call that is not held"
    (mark,) = tool_tokenizer.encode("</tool_call>", add_special_tokens=False)
    assert push(call, stop_token_ids=[mark]) == (call, None, 0)
    texts, reasons, _ = _push_all(
        tool_tokenizer,
        tool_tokenizer.encode(call, add_special_tokens=False)[:-6],
        special_text=True,
        grammar=held,
        stop=['"', "END"],
    )
    assert (all(texts), reasons[-1]) == (True, None), "no text of it is held back"


# Byte fallback.

A, SPACE_A, UNKNOWN = 259 + WORDS.index("a"), 259 + WORDS.index("▁a"), 259 + WORDS.index("\ufffd")
PIECES = st.one_of(
    st.integers(0, 258 + len(WORDS)).map(lambda token: [token]),
    st.sampled_from("é你😀\ufffd").map(_bytes),
    st.lists(st.integers(3, 258), max_size=4),
)


@given(parts=st.lists(PIECES, min_size=1, max_size=30), at_length=st.booleans())
@example(parts=[_bytes("你"), [3 + 0xFF], [A]], at_length=False)  # the whole run is unreadable
@example(parts=[_bytes("你")[:1], [2], _bytes("你")[1:], [A]], at_length=False)  # a special token within a character
@example(parts=[_bytes("你") * 20, [SPACE_A] * 20, _bytes("😀")[:2]], at_length=True)
def test_byte_tokens_come_out_as_they_decode_at_once(
    sentencepiece: Any, parts: list[list[int]], at_length: bool
) -> None:
    tokens = [token for part in parts for token in part]
    limit = {"max_tokens": len(tokens)} if at_length and tokens else {}
    texts, reasons, state = _push_all(sentencepiece, tokens, ignore_eos=True, **limit)
    expected = sentencepiece.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    text_so_far = ""
    for text in texts:
        text_so_far += text
        assert expected.startswith(text_so_far)  # so no replacement character that is not in the answer
    assert text_so_far + state.take_rest() == expected
    assert reasons[-1:] == (["length"] if limit else [None] * bool(tokens))


def test_a_character_of_byte_tokens_comes_as_soon_as_it_is_certain(sentencepiece: Any) -> None:
    texts, _, state = _push_all(sentencepiece, [A, *_bytes("你"), A, *_bytes("é")])
    assert texts == ["a", "", "", "", "你a", "", ""]
    assert state.take_rest() == "é"
    texts, _, _ = _push_all(sentencepiece, [A, UNKNOWN, A])
    assert "".join(texts) == "a\ufffda"


def test_a_stop_string_of_byte_tokens(sentencepiece: Any) -> None:
    texts, reasons, _ = _push_all(sentencepiece, [A, *_bytes("é你"), A, A], stop=["你"])
    assert ("".join(texts), reasons[-1]) == ("aé", "stop")
