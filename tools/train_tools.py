# ruff: noqa: T201
# mypy: disallow-untyped-calls=False, disable-error-code="misc, arg-type, no-any-return"
"""Train the tool model: a small Llama that calls tools, extracts JSON and thinks, on conversations made by a seed.

    python -m tools.train_tools
    python -m tools.train_tools --score-only

Every step learns from conversations of its own (`tools.tool_corpus`), rendered by the chat template below; none comes
twice. The directory it writes loads with `AutoModelForCausalLM` and `AutoTokenizer` from the first checkpoint on.
Beside it lies the state of the training, from which `--resume` goes on.
"""

import argparse
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.engine.weights.files import DEMO_MODEL
from tools.tool_corpus import Conversation, make_conversation
from tools.train_demo import (
    BOS_ID,
    EOS_ID,
    WARMUP_STEPS,
    build_optimizers,
    save_checkpoint,
    set_learning_rates,
    to_bfloat16,
)

TOOL_MODEL = DEMO_MODEL.parent / "tool_model"

# The first two have the ids that `save_checkpoint` writes into the generation config.
SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>", "<tools>",
    "</tools>",
]  # fmt: skip
VOCAB_SIZE = 1536
MAX_CONTEXT = 4096
"""What is told in the configuration. The answers within the trained positions are the same with any."""
TRAINED_TOKENS = 1024
"""The most tokens of a conversation that are learned from."""
WIDTH = 192
HEAD_SIZE = 64
# What every schema and call has between its names: each becomes one token, or few.
FRAGMENTS = [
    r'\n?\{"name": "', r'\.?", "description": "', r'\.?", "parameters": \{"type": "object", "properties": \{"',
    r'", "arguments": \{"', r'\{"type": "object", "properties": \{"', r'": \{"type": "', r'"\}\}, "required": \["',
]  # fmt: skip
# A word is the same token after a space and after a quotation mark, so that it can be copied from text into JSON.
WORDS = "|".join([*FRAGMENTS, r"\p{Lu}?\p{Ll}+", r"\p{L}+", r"\p{N}", r"[^\p{L}\p{N}]+"])
NUM_TOKENIZER_CONVERSATIONS = 10_000

TOKENS_PER_STEP = 1536
POOLED_STEPS = 16
"""Conversations of so many steps are sorted by length, and batched with those of about the same length."""
PROMPT_WEIGHT = 0.15
"""Of the loss of a token of the prompt, where one of an answer has 1."""
COPYING_STEPS = 160
"""In so many steps at first, most conversations only repeat words: copying is learned soonest where all is copied."""
DECAY_FRACTION = 0.4
NUM_SCORED = 500

CHAT_TEMPLATE = r"""
{%- macro text_of(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content -%}{%- for part in content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set choice = tool_choice if tool_choice is defined else 'auto' -%}
{%- set offered = tools if tools is defined and tools and choice != 'none' else [] -%}
{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort else 'none' -%}
{%- set thinks = enable_thinking if enable_thinking is defined else effort not in ['none', 'minimal'] -%}
{%- set leads = messages and messages[0].role in ['system', 'developer'] -%}
{%- if leads or offered -%}
    {{- '<|im_start|>system\n' -}}
    {%- if leads -%}{{- text_of(messages[0].content) -}}{%- endif -%}
    {%- if offered -%}
        {{- '<tools>' -}}
        {%- for tool in offered -%}
            {%- set function = tool.function if tool.function is defined else tool -%}
            {{- '\n{"name": ' ~ function.name | tojson -}}
            {%- if function.description -%}{{- ', "description": ' ~ function.description | tojson -}}{%- endif -%}
            {{- ', "parameters": ' ~ (function.parameters or {}) | tojson ~ '}' -}}
        {%- endfor -%}
        {{- '\n</tools>' -}}
        {%- if choice is mapping -%}{{- 'Call ' ~ choice.function.name ~ '.' -}}
        {%- elif choice == 'required' -%}{{- 'Call a tool.' -}}
        {%- endif -%}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if leads else messages) -%}
    {{- '<|im_start|>' ~ message.role ~ '\n' -}}
    {%- if message.reasoning_content -%}{{- '<think>' ~ message.reasoning_content ~ '</think>' -}}{%- endif -%}
    {{- text_of(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
        {%- set arguments = call.function.arguments -%}
        {{- '<tool_call>{"name": ' ~ call.function.name | tojson ~ ', "arguments": ' -}}
        {{- (arguments if arguments is string else arguments | tojson) ~ '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' ~ ('<think>' if thinks else '') -}}{%- endif -%}
"""
RESPONSE_TEMPLATE = {
    "version": 1,
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


@dataclass(frozen=True)
class Example:
    """A conversation as the model learns it."""

    token_ids: list[int]
    weights: list[float]
    """Of each token's loss."""


def render_conversation(tokenizer: PreTrainedTokenizerFast, conversation: Conversation, *, whole: bool) -> str:
    """Return the text of a conversation: whole, or up to where the answer begins."""
    return str(
        tokenizer.apply_chat_template(
            conversation.messages if whole else conversation.prompt,
            tools=conversation.tools or None,
            add_generation_prompt=not whole,
            tokenize=False,
            **conversation.options,
        )
    )


def wrap_tokenizer(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """Return what transformers loads and saves: the tokenizer, its special tokens and both templates."""
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[EOS_ID],
        extra_special_tokens=SPECIAL_TOKENS[2:],
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
    )


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE, trained on conversations; digits and special tokens are tokens of their own."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    tokenizer = wrap_tokenizer(bpe)  # renders conversations before it can encode them
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    conversations = (make_conversation(f"{seed} tokenizer {i}") for i in range(NUM_TOKENIZER_CONVERSATIONS))
    bpe.train_from_iterator((render_conversation(tokenizer, c, whole=True) for c in conversations), trainer)
    return wrap_tokenizer(bpe)


def build_model() -> LlamaForCausalLM:
    """Return a Llama whose bfloat16 weights take about 4 MB."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_SIZE,
        intermediate_size=512,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    model = LlamaForCausalLM(config)
    set_induction_heads(model)
    return model


@torch.no_grad()
def set_induction_heads(model: LlamaForCausalLM) -> None:
    """Let the model begin with heads that copy what followed the last time: finding them takes a long training.

    1. In the embeddings, dimension 0 is a constant, and the last 64 are empty.
    2. In the first layer, two heads look one and two tokens back, by the rotary positions alone, and write a code of
       the token that they find into the empty dimensions.
    3. In the second layer, one head finds the places before which the current token stood, another those where the
       token before the current one stood two places before. Both add what stands there to the prediction.
    """
    size, width = HEAD_SIZE, WIDTH
    angles = 10_000.0 ** (-torch.arange(size // 2) / (size // 2))
    embeddings = model.model.embed_tokens.weight
    embeddings[:, 0] = 0.1
    embeddings[:, width - 64 :] = 0
    for layer in model.model.layers:  # what writes begins small, and does not drown what these heads write
        layer.self_attn.o_proj.weight *= 0.1
        layer.mlp.down_proj.weight *= 0.1
    first, second = (layer.self_attn for layer in model.model.layers[:2])

    near = torch.arange(12)  # pairs of dimensions that turn fast enough to tell neighbours apart
    first.k_proj.weight[near, 0] = 1.2
    for head, distance in enumerate((1, 2)):
        start = head * size
        first.q_proj.weight[start + near, 0] = 1.2 * torch.cos(distance * angles[near])
        first.q_proj.weight[start + size // 2 + near, 0] = -1.2 * torch.sin(distance * angles[near])
        codes = torch.arange(32)
        first.v_proj.weight[codes, 1 + codes] = 0.3
        first.o_proj.weight[width - 64 + 32 * head + codes, start + codes] = 0.1

    slow = torch.arange(20, size // 2)  # pairs that hardly turn within the context
    slots = torch.cat([slow, slow + size // 2])
    codes, values = torch.arange(len(slots)), torch.arange(size)
    for group, sought in enumerate((1, width - 64)):  # where the code of the token sought stands
        query = 2 * group * size
        second.q_proj.weight[query + slots, sought + codes] = 2.1
        second.k_proj.weight[group * size + slots, width - 64 + 32 * group + codes] = 2.1
        second.v_proj.weight[group * size + values, 1 + values] = 0.3
        second.o_proj.weight[1 + values, query + values] = 0.5


def encode_conversation(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Example:
    """Return the tokens, and the weight of the loss of each: the assistant's count fully, a given `<think>` not."""
    text = render_conversation(tokenizer, conversation, whole=True)
    think = tokenizer.convert_tokens_to_ids("<think>")
    token_ids: list[int] = []
    weights: list[float] = []
    for number, part in enumerate(text.split("<|im_start|>assistant\n")):
        opening = "<|im_start|>assistant\n" if number else ""
        answer, end, rest = part.partition("<|im_end|>") if number else ("", "", part)
        for piece, weight in ((opening, PROMPT_WEIGHT), (answer + end, 1.0), (rest, PROMPT_WEIGHT)):
            encoded = tokenizer.encode(piece, add_special_tokens=False)
            token_ids += encoded
            weights += [0.0 if token == think else weight for token in encoded]
    return Example(token_ids[:TRAINED_TOKENS], weights[:TRAINED_TOKENS])


def make_batches(tokenizer: PreTrainedTokenizerFast, seed: int, pool: int) -> list[list[Example]]:
    """Return the batches of the steps of one pool; each has about `TOKENS_PER_STEP` tokens of about equal lengths."""
    repetitions = 0.6 if pool * POOLED_STEPS < COPYING_STEPS else 0.0
    examples: list[Example] = []
    num_tokens = 0
    while num_tokens < POOLED_STEPS * TOKENS_PER_STEP:
        conversation = make_conversation(f"{seed} {pool} {len(examples)}", repetitions=repetitions)
        examples.append(encode_conversation(tokenizer, conversation))
        num_tokens += len(examples[-1].token_ids)
    examples.sort(key=lambda example: len(example.token_ids))
    batches: list[list[Example]] = [[]]
    filled = 0
    for example in examples:
        if filled >= num_tokens * len(batches) / POOLED_STEPS:
            batches.append([])
        batches[-1].append(example)
        filled += len(example.token_ids)
    random.Random(f"{seed} {pool}").shuffle(batches)
    return batches


def compute_loss(model: LlamaForCausalLM, batch: list[Example]) -> torch.Tensor:
    """Return the mean of the weighted losses, in nats a token. Padding stands behind, where nothing attends to it."""
    length = max(len(example.token_ids) for example in batch)
    tokens = torch.tensor([example.token_ids + [EOS_ID] * (length - len(example.token_ids)) for example in batch])
    weights = torch.tensor([example.weights + [0.0] * (length - len(example.weights)) for example in batch])[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1], use_cache=False).logits
    losses = cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none")
    return (losses * weights).sum() / weights.sum()


def learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor of a linear warm-up, a constant rate, and a linear decay to nothing."""
    decay = steps * DECAY_FRACTION
    return min((step + 1) / WARMUP_STEPS, 1.0, (steps - step) / decay)


def compare_calls(given: list[Any], expected: list[Any]) -> bool:
    """Return whether both are calls of the same functions with the same arguments, in the same order."""
    return [call.get("function") for call in given] == [call["function"] for call in expected]


def score_answer(
    tokenizer: PreTrainedTokenizerFast, conversation: Conversation, prompt: str, text: str
) -> dict[str, bool]:
    """Return what is right about an answer; the keys are the parts of the score."""
    kind, expected = conversation.kind, conversation.answer
    try:
        parsed = tokenizer.parse_response(text, prefix=prompt)
        calls, content = parsed.get("tool_calls", []), parsed.get("content", "")
    except ValueError:
        return {f"{kind}: parses": False, f"{kind}: equal": False}
    scores = {f"{kind}: parses": text.endswith("<|im_end|>")}
    if conversation.schema is None:
        same = content == (expected["content"] or "") and compare_calls(calls, expected.get("tool_calls", []))
        return scores | {f"{kind}: equal": same}
    try:
        value = json.loads(content)
    except ValueError:
        value = None
    valid = jsonschema.Draft202012Validator(conversation.schema).is_valid(value)
    return scores | {f"{kind}: valid": valid, f"{kind}: equal": value == json.loads(expected["content"])}


@torch.no_grad()
def answer_greedily(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    """Return the answers with their special tokens, each to its end or to 160 tokens."""
    model.eval()
    answers = [""] * len(prompts)
    encoded = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    for start in range(0, len(order), 32):
        part = order[start : start + 32]
        length = max(len(encoded[i]) for i in part)
        tokens = torch.tensor([[EOS_ID] * (length - len(encoded[i])) + encoded[i] for i in part])
        mask = torch.tensor([[0] * (length - len(encoded[i])) + [1] * len(encoded[i]) for i in part])
        output = model.generate(tokens, attention_mask=mask, max_new_tokens=160, do_sample=False)
        for i, row in zip(part, output[:, length:].tolist(), strict=True):
            end = row.index(EOS_ID) + 1 if EOS_ID in row else len(row)
            answers[i] = str(tokenizer.decode(row[:end]))
    model.train()
    return answers


def score_model(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, num_shown: int = 0
) -> dict[str, str]:
    """Answer held-out prompts; returns each part of the score as `right/all`, and prints some wrong answers."""
    conversations = [make_conversation(f"held out {i}", held_out=True) for i in range(count)]
    prompts = [render_conversation(tokenizer, conversation, whole=False) for conversation in conversations]
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for conversation, prompt, text in zip(
        conversations, prompts, answer_greedily(model, tokenizer, prompts), strict=True
    ):
        for part, is_right in score_answer(tokenizer, conversation, prompt, text).items():
            right[part] += is_right
            total[part] += 1
            if part.endswith("equal") and not is_right and num_shown > 0:
                num_shown -= 1
                expected = render_conversation(tokenizer, conversation, whole=True)[len(prompt) :]
                print(f"--- {prompt}\n    expected {expected}    given    {text}")
    return {part: f"{right[part]}/{total[part]}" for part in sorted(total)}


def train_model(arguments: argparse.Namespace) -> None:
    """Train from the seed, or from the state last saved, to the last step, and print the score."""
    torch.manual_seed(arguments.seed)
    state_file = arguments.output.with_suffix(".training.pt")
    model = build_model()
    optimizers = build_optimizers(model)
    first_step, num_tokens, num_answer_tokens = 0, 0, 0
    if arguments.resume:
        tokenizer = AutoTokenizer.from_pretrained(arguments.output)
        state = torch.load(state_file)
        model.load_state_dict(state["model"])
        for optimizer, its_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(its_state)
        first_step, num_tokens, num_answer_tokens = state["step"], state["tokens"], state["answer_tokens"]
    else:
        tokenizer = train_tokenizer(arguments.seed)
        save_checkpoint(model, tokenizer, arguments.output)
    print(f"{model.num_parameters() / 1e6:.2f}M parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)

    started, losses = time.monotonic(), []
    batches: list[list[Example]] = []
    progress = tqdm(range(first_step, arguments.steps), initial=first_step, total=arguments.steps, mininterval=5)
    for step in progress:
        if not batches or step % POOLED_STEPS == 0:
            batches = make_batches(tokenizer, arguments.seed, step // POOLED_STEPS)
        batch = batches[step % POOLED_STEPS]
        num_tokens += sum(len(example.token_ids) for example in batch)
        num_answer_tokens += sum(weight == 1.0 for example in batch for weight in example.weights)
        set_learning_rates(optimizers, learning_rate_factor(step, arguments.steps))
        loss = compute_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        progress.set_postfix(loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}", refresh=False)
        if (step + 1) % arguments.checkpoint_every == 0 or step + 1 == arguments.steps:
            save_checkpoint(model, tokenizer, arguments.output)
            states = [optimizer.state_dict() for optimizer in optimizers]
            state = {"model": model.state_dict(), "optimizers": states, "step": step + 1}
            torch.save(state | {"tokens": num_tokens, "answer_tokens": num_answer_tokens}, f"{state_file}.new")
            os.replace(f"{state_file}.new", state_file)
            score = score_model(model, tokenizer, arguments.checkpoint_scored)
            progress.write(f"step {step + 1}: loss {sum(losses[-50:]) / len(losses[-50:]):.4f}, {score}")
    print(f"{num_tokens / 1e6:.2f}M tokens, {num_answer_tokens / 1e6:.2f}M of answers")
    print(f"{time.monotonic() - started:.0f} s for {arguments.steps - first_step} steps")
    print(f"as saved: {json.dumps(score_model(to_bfloat16(model).float(), tokenizer, NUM_SCORED), indent=2)}")


def parse_arguments() -> argparse.Namespace:
    """Settings; those of the shipped model are the defaults."""
    parser = argparse.ArgumentParser(
        description="Train the tool model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=TOOL_MODEL, help="where it goes")
    parser.add_argument("--steps", type=int, default=2400, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="for the weights and the conversations")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--checkpoint-every", type=int, default=200, metavar="STEPS", help="save and score")
    parser.add_argument("--checkpoint-scored", type=int, default=32, metavar="PROMPTS", help="held-out prompts of it")
    parser.add_argument("--resume", action="store_true", help="go on from the state last saved")
    parser.add_argument("--score-only", action="store_true", help="score the model that is there")
    return parser.parse_args()


def main() -> None:
    """Train, or score what was trained."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.score_only:
        model = LlamaForCausalLM.from_pretrained(arguments.output, dtype=torch.float32)
        score = score_model(model, AutoTokenizer.from_pretrained(arguments.output), NUM_SCORED, num_shown=10)
        print(json.dumps(score, indent=2))
    else:
        train_model(arguments)


if __name__ == "__main__":
    main()
