"""K and V in 8 bits against bf16, part of `benchmarks.weights`: room for tokens, decode at long contexts, flips."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine import THREADS
from penstock.config.settings import EngineSettings
from penstock.engine.accelerate import accelerate_model
from penstock.engine.engine import Engine
from penstock.engine.loading import load_model
from penstock.engine.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.engine.step_batch import StepBatch
from penstock.engine.storage import BlockLayout
from penstock.messages import Sampling

NUM_SEQUENCES = 32
NUM_FLIP_TOKENS = 48
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Side:
    """An engine whose pool holds the context of some sequences, and the batch that decodes one token of each."""

    engine: Engine
    batch: StepBatch

    @torch.inference_mode()
    def time_step(self) -> float:
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
    sides = {}
    for kv_dtype in ("auto", "int8"):
        settings = EngineSettings(model=str(model), dtype="bfloat16", kv_dtype=kv_dtype, threads=THREADS)
        sides[kv_dtype] = make_side(accelerate_model(load_model(settings)), settings, context_tokens)
    stored, int8 = sides["auto"], sides["int8"]
    ratios = []
    for number in range(num_rounds):
        first, second = (stored, int8) if number % 2 else (int8, stored)
        seconds = {first: first.time_step(), second: second.time_step()}
        if number:  # the first round warms up
            ratios.append(seconds[stored] / seconds[int8])
            print(f"bf16 {seconds[stored]:.3f} s, int8 {seconds[int8]:.3f} s", flush=True)
    layouts = stored.engine.model.layout, int8.engine.model.layout
    return {
        "kv_int8_tokens_ratio": layouts[0].block_bytes / layouts[1].block_bytes,
        "kv_int8_decode_b32_long": statistics.median(ratios),
    }


def count_flips(num_prompts: int) -> float:
    """Return the share of the demo model's greedy answers' tokens, up to the first other one, that are another."""
    answers = []
    for kv_dtype in ("auto", "int8"):
        settings = EngineSettings(dtype="bfloat16", kv_dtype=kv_dtype)
        engine = Engine(accelerate_model(load_model(settings)), settings)
        tokenizer = engine.model.tokenizer
        text = "And the king said unto the people of the land: "
        seqs = []
        for number in range(num_prompts):
            ids = tokenizer(text * (1 + number % 5) + "Go" * number)["input_ids"]
            seqs.append(Sequence(str(number), ids, sampling=GREEDY, seed=0, max_new_tokens=NUM_FLIP_TOKENS))
            engine.add_sequence(seqs[-1])
        while engine.has_work():
            for sampled in engine.step():
                if sampled.seq.num_output_tokens == NUM_FLIP_TOKENS:
                    engine.remove_sequence(sampled.seq)
        answers.append([seq.output_token_ids for seq in seqs])
    num_same = num_flips = 0
    for one, other in zip(*answers, strict=True):
        same = next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
        num_same, num_flips = num_same + same, num_flips + (same < len(one))
    return num_flips / (num_same + num_flips)


def measure_kv(model: Path, context_tokens: int, num_rounds: int, num_flip_prompts: int) -> dict[str, float]:
    """Return the figures of K and V in 8 bits."""
    return measure_long_decode(model, context_tokens, num_rounds) | {"kv_int8_flips": count_flips(num_flip_prompts)}
