"""Tokenizers of the three known kinds, and chat templates in the forms that are published, written anew for tests."""

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    "chatml": "<|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> </tool_response> <think> </think>",
    "llama": "<|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>",
    "mistral": (
        "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] [IMG]"
    ),
    "gemma": "<start_of_turn> <end_of_turn> <image_soft_token> <table> <unused7>",
    "deepseek": (
        "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
        "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> "
        "<think> </think>"
    ),
    "phi": "<|system|> <|user|> <|assistant|> <|tool|> <|/tool|> <|end|>",
    "harmony": "<|start|> <|message|> <|channel|> <|end|> <|call|> <|return|> <|constrain|>",
    "glm": (
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <tool_call> </tool_call> "
        "<tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>"
    ),
    "granite": "<|start_of_role|> <|end_of_role|> <|end_of_text|> <|tool_call|>",
    "command-r": (
        "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> "
        "<results> </results>"
    ),
}
"""The added tokens of a model, by the family whose form its template has."""
KINDS = ("bytes", "pieces", "unigram")
_PIECES = ["<unk>", "<s>", "</s>"]


def _make_words() -> list[str]:
    rng = random.Random(5)
    syllables = [
        "the",
        "tool",
        "call",
        "im",
        "end",
        "start",
        "system",
        "user",
        "th",
        "ink",
        "er",
        "a",
        "city",
        "es",
        "un",
    ]
    signs = ["<", ">", "</", "|>", "<|", "[", "]", "{", "}", '"', ":", "\n", "ü", "東", "_", "-", ","]
    sentences = []
    for _ in range(600):
        words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(8)]
        sentences.append(" ".join(rng.choice(signs) + word if rng.random() < 0.4 else word for word in words))
    return sentences


@lru_cache
def _train_tokenizer(kind: str) -> str:
    """Return the JSON of a tokenizer of a kind, without added tokens but its own."""
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(_make_words(), trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
        tokenizer.add_special_tokens(["<s>", "</s>"])
    elif kind == "pieces":  # as SentencePiece's, with bytes for what it has no piece for
        trained = Tokenizer(models.BPE(unk_token="<unk>"))
        trained.pre_tokenizer = pre_tokenizers.Metaspace()
        trained.train_from_iterator(_make_words(), trainers.BpeTrainer(vocab_size=500, special_tokens=_PIECES))
        described = json.loads(trained.to_str())["model"]
        bytes_ = {f"<0x{byte:02X}>": number for number, byte in enumerate(range(256), len(described["vocab"]))}
        merges = [(a, b) for a, b in described["merges"]]
        model = models.BPE(
            {**described["vocab"], **bytes_}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer.add_special_tokens(_PIECES)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(
            vocab_size=400, special_tokens=_PIECES, unk_token="<unk>",
            initial_alphabet=[chr(code) for code in range(33, 127)] + ["｜", "▁"],
        )  # fmt: skip
        tokenizer.train_from_iterator(_make_words(), trainer)
    return str(tokenizer.to_str())


def make_chat_tokenizer(family: str, kind: str, *, strips: bool = False) -> Any:
    """Return a tokenizer of a kind with a family's template and tokens: every other one is special, and with `strips`
    each takes the spaces at a side.
    """
    template = Path(__file__).with_name("chat_templates") / f"{family}.jinja"
    backend = Tokenizer.from_str(_train_tokenizer(kind))
    names: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"} | (
        {} if kind == "bytes" else {"unk_token": "<unk>"}
    )
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template.read_text("utf-8"), **names
    )
    for number, token in enumerate(TEMPLATES[family].split()):
        sides = {"lstrip": number % 3 != 1, "rstrip": number % 3 != 0} if strips else {}
        tokenizer.add_tokens([AddedToken(token, special=number % 2 == 0, normalized=False, **sides)])
    return tokenizer
