"""K and V in 8 bits against bf16, part of `benchmarks.weights`: room for tokens, decode at long contexts, flips."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.comparison import compute_ratio, measure_in_turns, print_table
from benchmarks.engine import THREADS
from benchmarks.systems import GREEDY, count_same_tokens, run_sequences
from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.loading import load_model
from penstock.engine.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.engine.step_batch import StepBatch
from penstock.engine.storage import BlockLayout

NUM_SEQUENCES = 32
NUM_FLIP_TOKENS = 48
KV_DTYPES: tuple[Literal["auto", "int8"], ...] = ("auto", "int8")


@dataclass(frozen=True)
class Side:
    """An engine whose pool holds the context of some sequences, and the batch that decodes one token of each."""

    engine: Engine
    batch: StepBatch

    @torch.inference_mode()
    def time_step(self, _: int = 0) -> float:
        """Return the seconds of a decode step."""
        begun_s = time.perf_counter()
        self.engine.runner.run_step(self.batch)
        return time.perf_counter() - begun_s


def make_block(layout: BlockLayout) -> torch.Tensor:
    """Return the elements of a block with random vectors."""
    if not layout.is_int8:
        return torch.randn(layout.block_elements).to(layout.dtype)
    block = torch.randint(-127, 128, (layout.block_elements,), dtype=torch.int8)
    for offset, heads, width in layout.parts[1::2]:
        scales = torch.full((heads * layout.block_size,), 0.02)
        block[offset : offset + heads * layout.block_size * width] = scales.view(torch.int8)
    return block


def make_side(model: LoadedModel, settings: EngineSettings, context: int) -> Side:
    """Return a side whose blocks have random content: a context that was computed would take minutes."""
    blocks_each = context // settings.block_size + 1
    num_bytes = NUM_SEQUENCES * blocks_each * model.layout.block_bytes
    engine = Engine(model, settings.model_copy(update={"pool_mb": num_bytes // 2**20 + 1}))
    engine.storage.data.copy_(make_block(model.layout))
    seqs = []
    for number in range(NUM_SEQUENCES):
        tokens = [(7 * place + number) % model.vocab_size for place in range(context + 1)]
        seqs.append(
            Sequence(str(number), tokens[:-1], sampling=GREEDY, seed=0, max_new_tokens=2, output_token_ids=tokens[-1:])
        )
        seqs[-1].block_table = engine.pool.allocate_blocks(blocks_each)
        seqs[-1].num_computed_tokens = context
    return Side(engine, StepBatch([(seq, 1) for seq in seqs], settings.block_size, model.device))


def measure_long_decode(model: Path, context_tokens: int, num_rounds: int) -> dict[str, float]:
    """Return how many more tokens fit, and how much faster 32 sequences decode at a long context."""
    sides: dict[str, Side] = {}
    for kv_dtype in KV_DTYPES:
        settings = EngineSettings(model=str(model), dtype="bfloat16", kv_dtype=kv_dtype, threads=THREADS)
        sides[kv_dtype] = make_side(accelerate_model(load_model(settings)), settings, context_tokens)
    steps = {name: side.time_step for name, side in sides.items()}
    seconds = measure_in_turns(steps, num_rounds - 1, "long contexts", num_warm=1)
    print_table(seconds, "s")
    stored, int8 = (sides[name].engine.model.layout.block_bytes for name in KV_DTYPES)
    return {"kv_int8_tokens_ratio": stored / int8, "kv_int8_decode_b32_long": compute_ratio(seconds, *KV_DTYPES)}


def count_flips(num_prompts: int) -> float:
    """Return the share of the demo model's greedy answers' tokens, up to the first other one, that are another."""
    answers = []
    for kv_dtype in KV_DTYPES:
        settings = EngineSettings(dtype="bfloat16", kv_dtype=kv_dtype)
        engine = Engine(accelerate_model(load_model(settings)), settings)
        text, seqs = "And the king said unto the people of the land: ", list[Sequence]()
        for number in range(num_prompts):
            ids = engine.model.tokenizer(text * (1 + number % 5) + "Go" * number)["input_ids"]
            seqs.append(Sequence(str(number), ids, sampling=GREEDY, seed=0, max_new_tokens=NUM_FLIP_TOKENS))
        run_sequences(engine, seqs)
        answers.append([seq.output_token_ids for seq in seqs])
    same = [count_same_tokens(one, other) for one, other in zip(*answers, strict=True)]
    num_flips = sum(count < NUM_FLIP_TOKENS for count in same)
    return num_flips / (sum(same) + num_flips)


def measure_kv(model: Path, context_tokens: int, num_rounds: int, num_flip_prompts: int) -> dict[str, float]:
    """Return the figures of K and V in 8 bits."""
    return measure_long_decode(model, context_tokens, num_rounds) | {"kv_int8_flips": count_flips(num_flip_prompts)}
