"""What the codecs of the KV store save and cost, on KV that the demo model made; and what int8 does to its tokens.

python -m benchmarks.codecs [--quick] [--json FILE]

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

from benchmarks.common import Arguments, arguments, machine, report
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.handover import export_blocks, import_blocks
from penstock.engine.opening import open_engine
from penstock.engine.sequence import Sequence
from penstock.kvstore.codec import Codec, PayloadShape
from penstock.kvstore.codec.contract import Element
from penstock.kvstore.codec.int8 import Int8Codec
from penstock.kvstore.codec.lossless import LosslessCodec
from penstock.messages import Sampling

GREEDY = Sampling(temperature=0.0)
WORDS = ("and the king", "go ye into", "in the beginning", "the shepherd", "of wine and oil", "Israel said", "behold")
ELEMENTS: tuple[Element, ...] = ("float32", "bfloat16")


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    prompts: int
    prompt_tokens: int
    answer_tokens: int
    blocks: int
    rounds: int


FULL = Extent(prompts=300, prompt_tokens=200, answer_tokens=64, blocks=400, rounds=7)
QUICK = Extent(prompts=40, prompt_tokens=120, answer_tokens=32, blocks=100, rounds=3)


def open_demo(element: Element) -> Engine:
    """The demo model."""
    return open_engine(EngineSettings(dtype=element, pool_mb=256, max_batch=32))


def run(engine: Engine, seqs: Items[Sequence]) -> None:
    """Step until all have their tokens; they stay in the engine."""
    for seq in seqs:
        engine.add_sequence(seq)
    while engine.has_work():
        engine.step()


def texts(engine: Engine, extent: Extent) -> list[list[int]]:
    """Prompts in the model's own language, of different lengths."""
    rng, seqs = random.Random(20261121), list[Sequence]()
    for number in range(extent.prompts):
        words = engine.model.tokenizer.encode(rng.choice(WORDS), add_special_tokens=False)
        length = rng.randrange(extent.prompt_tokens // 4, extent.prompt_tokens)
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=number)
        seqs.append(Sequence(f"text {number}", words, max_new_tokens=length, sampling=sampling, seed=number))
    run(engine, seqs)
    for seq in seqs:
        engine.remove_sequence(seq)
    return [seq.token_ids for seq in seqs]


def keys(number: int, length: int, block_size: int) -> list[bytes]:
    """Names for the full blocks of a prompt that nobody else has."""
    return [number.to_bytes(16) + index.to_bytes(16) for index in range(length // block_size)]


class KV:
    """The prompts' KV, and the token after each, as a prefill engine made them."""

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        self.prompts, self.payloads, self.firsts = prompts, list[list[bytes]](), list[int]()
        for number, prompt in enumerate(track(prompts, "prefill")):
            seq = Sequence(f"prompt {number}", prompt, max_new_tokens=1, sampling=GREEDY, seed=0)
            run(engine, [seq])
            self.payloads.append(export_blocks(engine, seq))
            self.firsts.append(seq.output_token_ids[0])
            engine.remove_sequence(seq)

    def answers(self, engine: Engine, max_new: int, codec: Codec | None) -> list[list[int]]:
        """What another engine says, given the KV as it is, or as it comes out of the codec."""
        seqs, at_once = list[Sequence](), engine.settings.max_batch
        for start in range(0, len(self.prompts), at_once):
            batch = [
                self._answer(engine, number, max_new, codec)
                for number in range(start, min(start + at_once, len(self.prompts)))
            ]
            run(engine, batch)
            for seq in batch:
                engine.remove_sequence(seq)
            seqs += batch
        return [seq.output_token_ids for seq in seqs]

    def _answer(self, engine: Engine, number: int, max_new: int, codec: Codec | None) -> Sequence:
        """A sequence whose prompt's KV the engine has."""
        prompt, size = self.prompts[number], engine.settings.block_size
        names = keys(number if codec is None else number + len(self.prompts), len(prompt), size)
        seq = Sequence(
            f"answer {number}", prompt, max_new_tokens=max_new, sampling=GREEDY, seed=0,
            output_token_ids=[self.firsts[number]], block_keys=names,
        )  # fmt: skip
        payloads = self.payloads[number]
        through = payloads if codec is None else [there_and_back(codec, payload) for payload in payloads]
        assert import_blocks(engine, seq, through) == len(names), "no room for a prompt's KV"
        return seq


def there_and_back(codec: Codec, payload: bytes) -> bytes:
    """What a reader gets."""
    number, content = codec.encode_payload(memoryview(payload))
    if not number:
        return payload
    into = bytearray(len(payload))
    assert codec.decode_payload(content, memoryview(into))
    return bytes(into)


def measure(codec: Codec, payloads: Items[bytes], rounds: int) -> dict[str, float]:
    """Ratio, and payload bytes a second each way in GB/s."""
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


def flips(raw: Items[list[int]], other: Items[list[int]]) -> dict[str, float]:
    """How often the first different token comes."""
    num_flipped = num_said = 0
    for one, two in zip(raw, other, strict=True):
        first = next((index for index, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), None)
        num_flipped += first is not None
        num_said += len(one) - 1 if first is None else first  # the first token comes from the prefill, without int8
    return {"int8_flips_per_1000_tokens": 1000 * num_flipped / num_said, "int8_flipped_answers": num_flipped / len(raw)}


def main(given: Arguments) -> dict[str, float]:
    """All figures."""
    extent, figures = QUICK if given.quick else FULL, dict[str, float]()
    print(f"{machine()}; {extent.prompts} prompts of up to {extent.prompt_tokens} tokens")
    for element in ELEMENTS:
        engine = open_demo(element)
        layout = engine.storage.layout
        shape = PayloadShape(element, layout.vector_shapes)
        kv = KV(engine, texts(engine, extent))
        payloads = [payload for each in kv.payloads for payload in each[:-1]][: extent.blocks]
        for codec in (LosslessCodec(element), Int8Codec(shape)):
            for name, value in measure(codec, payloads, extent.rounds).items():
                figures[f"{codec.name}_{element}_{name}"] = value
        other = open_demo(element)
        raw = kv.answers(other, extent.answer_tokens, None)
        through = kv.answers(other, extent.answer_tokens, Int8Codec(shape))
        figures |= {f"{name}_{element}": value for name, value in flips(raw, through).items()}
    return figures


if __name__ == "__main__":
    given = arguments(__doc__)
    report(main(given), given)
