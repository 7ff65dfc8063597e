"""What the codecs of the KV store save and cost, on KV that the demo model made; and what int8 does to its tokens.

python -m benchmarks.codecs [--quick | --smoke] [--json FILE]

Prompts are texts that the demo model wrote itself, sampled, after a few words each. Their KV blocks, in float32 and in
bfloat16, are encoded and decoded one after the other; told are the bytes that are left of a byte, and the speed of
each direction in payload, the best of several rounds on one core.

int8: the same prompts are prefilled by one engine, and their KV handed to another one twice: as it is, and encoded and
decoded. Both answer greedily. A flip is the first token that differs; told are flips for 1,000 tokens said up to there,
and the share of answers that have one. The KV of the answers' own tokens is not encoded.
"""

import random
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass

from rich.progress import track

from benchmarks.common import Arguments, run_benchmark
from benchmarks.systems import count_same_tokens, run_sequences
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.loading import open_engine
from penstock.engine.sequence import Sequence
from penstock.kvstore.codec import Codec, PayloadShape
from penstock.kvstore.codec.contract import Element
from penstock.kvstore.codec.int8 import Int8Codec
from penstock.kvstore.codec.lossless import LosslessCodec
from penstock.messages import Sampling
from tools.handover import export_blocks, import_blocks

GREEDY = Sampling(temperature=0.0)
PROMPT_BEGINNINGS = (
    "and the king", "go ye into", "in the beginning", "the shepherd", "of wine and oil", "Israel said", "behold",
)  # fmt: skip
ELEMENTS: tuple[Element, ...] = ("float32", "bfloat16")


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    num_prompts: int
    prompt_tokens: int
    answer_tokens: int
    num_blocks: int
    num_rounds: int


FULL = Extent(num_prompts=300, prompt_tokens=200, answer_tokens=64, num_blocks=400, num_rounds=7)
QUICK = Extent(num_prompts=40, prompt_tokens=120, answer_tokens=32, num_blocks=100, num_rounds=3)
SMOKE = Extent(num_prompts=4, prompt_tokens=60, answer_tokens=8, num_blocks=8, num_rounds=1)


def open_demo(element: Element) -> Engine:
    """Open the demo model."""
    return open_engine(EngineSettings(dtype=element, pool_mb=256, max_batch=32))


def generate_prompts(engine: Engine, extent: Extent) -> list[list[int]]:
    """Return prompts of different lengths that the model generated itself."""
    rng, seqs = random.Random(20261121), list[Sequence]()
    for number in range(extent.num_prompts):
        words = engine.model.tokenizer.encode(rng.choice(PROMPT_BEGINNINGS), add_special_tokens=False)
        length = rng.randrange(extent.prompt_tokens // 4, extent.prompt_tokens)
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=number)
        seqs.append(Sequence(f"text {number}", words, max_new_tokens=length, sampling=sampling, seed=number))
    run_sequences(engine, seqs)
    for seq in seqs:
        engine.remove_sequence(seq)
    return [seq.token_ids for seq in seqs]


class PromptKV:
    """The KV of all prompts, and the token after each, as a prefill engine computed them."""

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        self.prompts, self.payloads, self.first_tokens = prompts, list[list[bytes]](), list[int]()
        for number, prompt in enumerate(track(prompts, "prefill")):
            seq = Sequence(f"prompt {number}", prompt, max_new_tokens=1, sampling=GREEDY, seed=0)
            run_sequences(engine, [seq])
            self.payloads.append(export_blocks(engine, seq))
            self.first_tokens.append(seq.output_token_ids[0])
            engine.remove_sequence(seq)

    def generate_answers(self, engine: Engine, max_new: int, codec: Codec | None) -> list[list[int]]:
        """Return another engine's answers, given the KV as it is, or encoded and decoded by a codec."""
        answers, at_once = list[list[int]](), engine.settings.max_batch
        for start in range(0, len(self.prompts), at_once):
            numbers = range(start, min(start + at_once, len(self.prompts)))
            batch = [self._make_sequence(engine, number, max_new, codec) for number in numbers]
            run_sequences(engine, batch)
            for seq in batch:
                engine.remove_sequence(seq)
            answers += [seq.output_token_ids for seq in batch]
        return answers

    def _make_sequence(self, engine: Engine, number: int, max_new: int, codec: Codec | None) -> Sequence:
        """Return a sequence whose prompt's KV the engine has, under keys that no other prompt has."""
        prompt, own = self.prompts[number], number if codec is None else number + len(self.prompts)
        keys = [own.to_bytes(16) + at.to_bytes(16) for at in range(len(prompt) // engine.settings.block_size)]
        seq = Sequence(
            f"answer {number}", prompt, max_new_tokens=max_new, sampling=GREEDY, seed=0,
            output_token_ids=[self.first_tokens[number]], block_keys=keys,
        )  # fmt: skip
        payloads = self.payloads[number]
        through = payloads if codec is None else [encode_and_decode(codec, payload) for payload in payloads]
        assert import_blocks(engine, seq, through) == len(keys), "no room for a prompt's KV"
        return seq


def encode_and_decode(codec: Codec, payload: bytes) -> bytes:
    """Return a payload as a reader gets it."""
    number, content = codec.encode_payload(memoryview(payload))
    if not number:
        return payload
    into = bytearray(len(payload))
    assert codec.decode_payload(content, memoryview(into))
    return bytes(into)


def measure_codec(codec: Codec, payloads: Items[bytes], rounds: int) -> dict[str, float]:
    """Return the ratio, and the payload bytes per second of each direction in GB/s."""
    total = sum(map(len, payloads))
    into = memoryview(bytearray(len(payloads[0])))
    encoding, decoding = list[float](), list[float]()
    encoded: list[memoryview] = []
    for _ in range(rounds):
        begun = time.perf_counter()
        encoded = [codec.encode_payload(memoryview(payload))[1] for payload in payloads]
        encoding.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        for content in encoded:
            codec.decode_payload(content, into)
        decoding.append(time.perf_counter() - begun)
    kept = sum(map(len, encoded)) / total
    return {"kept": kept, "encode_gbs": total / min(encoding) / 1e9, "decode_gbs": total / min(decoding) / 1e9}


def compare_answers(raw: Items[list[int]], other: Items[list[int]]) -> dict[str, float]:
    """Return how often the first different token comes."""
    same = [count_same_tokens(one, two) for one, two in zip(raw, other, strict=True)]
    num_flipped = sum(count < len(one) for count, one in zip(same, raw, strict=True))
    # The first token comes from the prefill, without int8.
    num_compared = sum(len(one) - 1 if count == len(one) else count for count, one in zip(same, raw, strict=True))
    return {
        "int8_flips_per_1000_tokens": 1000 * num_flipped / num_compared,
        "int8_flipped_answers": num_flipped / len(raw),
    }


def run(given: Arguments) -> dict[str, float]:
    """Measure; return all figures."""
    extent, figures = given.choose_size(FULL, QUICK, SMOKE), dict[str, float]()
    print(f"{extent.num_prompts} prompts of up to {extent.prompt_tokens} tokens")
    for element in ELEMENTS:
        engine = open_demo(element)
        layout = engine.storage.layout
        shape = PayloadShape(element, layout.vector_shapes)
        kv = PromptKV(engine, generate_prompts(engine, extent))
        payloads = [payload for each in kv.payloads for payload in each[:-1]][: extent.num_blocks]
        for codec in (LosslessCodec(element), Int8Codec(shape)):
            for name, value in measure_codec(codec, payloads, extent.num_rounds).items():
                figures[f"{codec.name}_{element}_{name}"] = value
        other = open_demo(element)
        raw = kv.generate_answers(other, extent.answer_tokens, None)
        through = kv.generate_answers(other, extent.answer_tokens, Int8Codec(shape))
        figures |= {f"{name}_{element}": value for name, value in compare_answers(raw, through).items()}
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run)
