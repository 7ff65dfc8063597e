"""Train the demo model: a Llama of 3.8M parameters that continues text in the manner of the King James Bible.

The text is the one Debian ships as `bible-kjv-text`, printed by the `bible` command of package `bible-kjv`:

    apt-get install bible-kjv bible-kjv-text
    python tools/train_demo.py

Everything is fixed beforehand: the seed, the number of steps, the sequence lengths and the held-out
chapters. The directory it writes loads with `AutoModelForCausalLM` and `AutoTokenizer`, and does so from the
first minute on: each checkpoint replaces the one before it, file by file.
"""

import argparse
import copy
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.engine.weights.files import DEMO_MODEL

WHOLE_TEXT = "Gen1:1-Rev22:21"
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1
VOCAB_SIZE = 1024
MAX_CONTEXT = 1024
HOLD_OUT_EVERY = 33  # one chapter in 33 is never trained on, neither by the model nor by the tokenizer

TOKENS_PER_STEP = 5120
LENGTHS = (256, 256, 512, 1024)  # of the sequences in successive steps; the long ones teach far positions
WARMUP_STEPS = 50
FINAL_LR_FRACTION = 0.02
MUON_LR = 5e-3
ADAMW_LR = 3e-3
WEIGHT_DECAY = 0.1

# This model continues text and knows no roles: a conversation is its contents, a message a line.
CHAT_TEMPLATE = (
    r"{% for message in messages %}{{ message['content'] or '' }}"
    r"{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Corpus:
    """Chapters of verses, a verse a line, split into what is trained on and what is held out."""

    train: list[str]
    held_out: list[str]


@dataclass(frozen=True)
class Score:
    """Loss on the held-out chapters, over all tokens and by the position of the predicted token."""

    bits_per_char: float
    nats_per_token: float
    nats_by_position: dict[str, float]

    def __str__(self) -> str:
        """One line for the log."""
        by_position = ", ".join(f"{span} {nats:.3f}" for span, nats in self.nats_by_position.items())
        return f"{self.bits_per_char:.3f} bits/char, {self.nats_per_token:.3f} nats/token ({by_position})"


def read_chapters(bible: str) -> list[str]:
    """The whole text by chapter, without references: a printed line reads `Ge1:1 In the beginning ...`."""
    command = [bible, "-f", WHOLE_TEXT]
    printed = subprocess.run(command, check=True, capture_output=True, encoding="ascii").stdout
    verses = (line.split(" ", 1) for line in printed.splitlines() if line.strip())
    by_chapter = groupby(verses, key=lambda verse: verse[0].rpartition(":")[0])
    return ["\n".join(text.strip() for _, text in chapter) for _, chapter in by_chapter]


def split_corpus(chapters: list[str]) -> Corpus:
    """Hold out every 33rd chapter, so that the held-out part is spread over all the books."""
    held = range(HOLD_OUT_EVERY // 2, len(chapters), HOLD_OUT_EVERY)
    return Corpus([text for i, text in enumerate(chapters) if i not in held], [chapters[i] for i in held])


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: all 256 bytes are in the alphabet, so any text survives the round trip."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
    )


def encode_chapters(tokenizer: PreTrainedTokenizerFast, chapters: list[str]) -> torch.Tensor:
    """One stream of token ids, with the end-of-sequence token after each chapter."""
    return torch.tensor([token for text in chapters for token in [*tokenizer.encode(text), EOS_ID]])


def build_model() -> LlamaForCausalLM:
    """A Llama whose bfloat16 weights, with the tokenizer, stay under 8 MB."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=224,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=640,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the linear layers, AdamW for the embedding and the norms."""
    embedding = model.get_input_embeddings().weight
    norms = [weight for weight in model.parameters() if weight.dim() < 2]
    matrices = [weight for weight in model.parameters() if weight.dim() == 2 and weight is not embedding]
    groups = [{"params": [embedding], "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=ADAMW_LR, betas=(0.9, 0.95)),
    ]


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a small fraction."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * progress))


def draw_batches(stream: torch.Tensor, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Random windows, [batch, length + 1]; the number of predicted tokens is the same at every length."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        length = LENGTHS[step % len(LENGTHS)]
        starts = torch.randint(0, len(stream) - length, (TOKENS_PER_STEP // length,), generator=generator)
        yield torch.stack([stream[start : start + length + 1] for start in starts.tolist()])


def token_losses(model: LlamaForCausalLM, window: torch.Tensor) -> torch.Tensor:
    """Nats for each predicted token, [batch, length]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(window[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().transpose(1, 2), window[:, 1:], reduction="none")


def train_step(model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], batch: torch.Tensor) -> float:
    """Learn from one batch; returns its mean loss in nats a token."""
    loss = token_losses(model, batch).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


@torch.no_grad()
def score_model(model: LlamaForCausalLM, stream: torch.Tensor, num_chars: int) -> Score:
    """Predict every held-out token once, in consecutive windows of the full context.

    A window starts anywhere in a chapter and with no context, which makes this a strict measure.
    End-of-sequence tokens cost bits but count no characters.
    """
    model.eval()
    windows = [stream[i : i + MAX_CONTEXT + 1] for i in range(0, len(stream) - 1, MAX_CONTEXT)]
    losses = [token_losses(model, window[None])[0] for window in windows]
    model.train()
    spans = [(0, 64), (64, 256), (256, 512), (512, 768), (768, 1024)]
    all_losses = torch.cat(losses)
    by_position = {f"{a}-{b}": torch.cat([loss[a:b] for loss in losses]).mean().item() for a, b in spans}
    return Score(
        bits_per_char=all_losses.sum().item() / math.log(2) / num_chars,
        nats_per_token=all_losses.mean().item(),
        nats_by_position=by_position,
    )


def to_bfloat16(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A rounded copy: what is saved, and therefore what the last score must be taken of."""
    return copy.deepcopy(model).to(torch.bfloat16)


def save_checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write beside the output, then move each file into place: a reader never sees half a file."""
    output.mkdir(parents=True, exist_ok=True)
    rounded = to_bfloat16(model)
    rounded.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".saving-") as staging:
        rounded.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        for path in Path(staging).iterdir():
            path.chmod(0o644)
            os.replace(path, output / path.name)


def continue_greedily(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    """The prompt and the 80 tokens most likely to follow."""
    prompt_ids = torch.tensor([tokenizer.encode(prompt)])
    mask = torch.ones_like(prompt_ids)
    model.eval()
    tokens = model.generate(prompt_ids, attention_mask=mask, max_new_tokens=80, do_sample=False)
    return str(tokenizer.decode(tokens[0]))


def set_learning_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Every optimizer follows the same schedule from its own peak, which it keeps in `defaults`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor


def train_model(arguments: argparse.Namespace) -> None:
    """Text to tokenizer to model to a directory, with a checkpoint in its place every so often."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    corpus = split_corpus(read_chapters(arguments.bible))
    tokenizer = train_tokenizer(corpus.train)
    stream, held_out = (encode_chapters(tokenizer, chapters) for chapters in (corpus.train, corpus.held_out))
    num_chars = sum(len(text) for text in corpus.held_out)
    model = build_model()
    save_checkpoint(model, tokenizer, arguments.output)
    print(f"{model.num_parameters() / 1e6:.2f}M parameters, {len(stream)} tokens to train on")
    print(f"{len(held_out)} tokens held out, {num_chars / len(held_out):.2f} characters each", flush=True)

    optimizers = build_optimizers(model)
    started = time.monotonic()
    progress = tqdm(draw_batches(stream, arguments.steps, arguments.seed), total=arguments.steps, mininterval=5)
    for step, batch in enumerate(progress):
        set_learning_rates(optimizers, learning_rate_factor(step, arguments.steps))
        loss = train_step(model, optimizers, batch)
        progress.set_postfix(loss=f"{loss:.3f}", refresh=False)
        if (step + 1) % arguments.checkpoint_every == 0:
            save_checkpoint(model, tokenizer, arguments.output)
            progress.write(f"step {step + 1}: held out {score_model(model, held_out, num_chars)}")

    save_checkpoint(model, tokenizer, arguments.output)
    saved = to_bfloat16(model)
    num_tokens, elapsed_s = arguments.steps * TOKENS_PER_STEP, time.monotonic() - started
    print(f"{arguments.steps} steps, {num_tokens / 1e6:.2f}M tokens, {elapsed_s:.0f} s")
    print(f"as saved: {score_model(saved, held_out, num_chars)}")
    print(continue_greedily(saved, tokenizer, "And it came to pass"))


def parse_arguments() -> argparse.Namespace:
    """Settings; those of the shipped model are the defaults."""
    parser = argparse.ArgumentParser(
        description="Train the demo model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--bible", default="bible", help="command that prints the text")
    parser.add_argument("--output", type=Path, default=DEMO_MODEL, help="where it goes")
    parser.add_argument("--steps", type=int, default=900, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="for the weights and the order of the text")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS", help="save and score")
    return parser.parse_args()


if __name__ == "__main__":
    train_model(parse_arguments())
