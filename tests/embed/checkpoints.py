"""Tiny checkpoints for vectors and scores, with random weights, as sentence-transformers writes them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules.logit_score import LogitScore
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

SPECIAL = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
WORDS = [f"{one}{end}" for one in ("bar", "cold", "dune", "echo", "fern", "gale", "hill") for end in ("", "s", "ing")]
BODY = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 3}
DECODER = BODY | {"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True, "hidden_size": 48}
DISTIL = {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 3}
POSITIONS = 130


@dataclass(frozen=True)
class Kind:
    """A class of models."""

    type: str
    """transformers' name of it."""
    pooling: str = "mean_tokens"
    config: Mapping[str, Any] = field(default_factory=lambda: BODY)
    template: Sequence[str] = ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1")
    """What the tokenizer makes of a text, and of two."""
    positions: int = POSITIONS
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """Of tokenizer_config.json."""


KINDS = {
    "bert": Kind("bert"),
    "roberta": Kind("roberta", config=BODY | {"pad_token_id": 0}, positions=POSITIONS + 1),
    "xlm-roberta": Kind("xlm-roberta", "cls_token", BODY | {"pad_token_id": 0}, positions=POSITIONS + 1),
    "mpnet": Kind("mpnet", config=BODY | {"pad_token_id": 0}, positions=POSITIONS + 1),
    "distilbert": Kind("distilbert", config=DISTIL),
    "modernbert": Kind("modernbert", config=BODY | {"local_attention": 16, "global_attn_every_n_layers": 2}),
    "mistral": Kind(
        "mistral", "lasttoken", DECODER | {"tie_word_embeddings": False, "sliding_window": None},
        ("<s> $A </s>", "<s> $A </s> $B </s>"), tokenizer={"padding_side": "left"},
    ),
    "qwen3": Kind(
        "qwen3", "lasttoken", DECODER, ("$A </s>", "$A </s> $B </s>"),
        tokenizer={"tokenizer_class": "Qwen2Tokenizer", "padding_side": "left"},
    ),
}  # fmt: skip


@cache
def _train_tokenizer() -> str:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    return str(made.to_str())


def write_tokenizer(directory: Path, kind: Kind, max_length: int) -> None:
    made = Tokenizer.from_str(_train_tokenizer())
    single, pair = kind.template
    made.post_processor = processors.TemplateProcessing(single, pair, special_tokens=list(SPECIAL.items()))
    made.save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "model_max_length": max_length, **kind.tokenizer,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def fill_weights(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if "embed" in name:
                weight.copy_(drawn)
            elif weight.ndim > 1:
                weight.copy_(1.6 * drawn / weight.shape[-1] ** 0.5)
            else:
                weight.add_(0.1 * drawn)


def write_checkpoint(
    directory: Path,
    name: str = "bert",
    *,
    max_length: int = 120,
    positions: int = 0,
    generates: bool = False,
    **about: Any,
) -> Path:
    """Write a checkpoint for vectors, of a model that also `generates` text or not. `about` is what it says of itself,
    such as prompts.
    """
    kind = KINDS[name]
    directory.mkdir(parents=True, exist_ok=True)
    config = _make_config(kind, positions)
    model = (AutoModelForCausalLM if generates else AutoModel).from_config(config).eval()
    fill_weights(model, 3)
    model.save_pretrained(directory)
    write_tokenizer(directory, kind, max_length)
    parts = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {
            "idx": idx,
            "name": str(idx),
            "path": f"{idx}_{part}" * bool(idx),
            "type": f"sentence_transformers.models.{part}",
        }
        for idx, part in enumerate(parts)
    ]
    write_json(directory / "modules.json", modules)
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    pooling = {f"pooling_mode_{mode}": mode == kind.pooling for mode in modes}
    write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": 48, **pooling})
    (directory / "2_Normalize").mkdir(exist_ok=True)
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    write_json(directory / "config_sentence_transformers.json", {"prompts": {}, **about})
    return directory


def write_reranker(directory: Path, num_labels: int = 1) -> Path:
    """Write a sequence classifier, which scores pairs."""
    kind = KINDS["bert"]
    directory.mkdir(parents=True, exist_ok=True)
    config = _make_config(kind)
    config.num_labels = num_labels
    model = AutoModelForSequenceClassification.from_config(config).eval()
    fill_weights(model, 5)
    model.save_pretrained(directory)
    write_tokenizer(directory, kind, 120)
    return directory


CHAT_TEMPLATE = "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}<s>"


def write_token_reranker(directory: Path) -> Path:
    """Write a decoder that scores pairs by how likely one token is behind them, and another, as Qwen3-Reranker."""
    kind, made = KINDS["qwen3"], directory / "decoder"
    made.mkdir(parents=True)
    model = AutoModelForCausalLM.from_config(_make_config(kind)).eval()
    fill_weights(model, 7)
    model.save_pretrained(made)
    write_tokenizer(made, replace(kind, tokenizer={**kind.tokenizer, "chat_template": CHAT_TEMPLATE}), 120)
    parts = [Transformer(str(made), transformer_task="text-generation"), LogitScore(10, 11)]
    CrossEncoder(modules=parts).save_pretrained(str(directory / "reranker"))
    return directory / "reranker"


def _make_config(kind: Kind, positions: int = 0) -> Any:
    vocab = Tokenizer.from_str(_train_tokenizer()).get_vocab_size()
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CONFIG_MAPPING[kind.type](
        **{"vocab_size": vocab, "max_position_embeddings": positions or kind.positions, **tokens, **kind.config}
    )


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def draw_text(num_words: int, seed: int = 0) -> str:
    """Return a text of so many words."""
    return " ".join(WORDS[(seed * 7 + at * at + at) % len(WORDS)] for at in range(num_words))
