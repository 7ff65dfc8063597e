"""Traces that rules of placement are compared on: chats with published lengths, and what is hard on a rule.

`Shape.source` says where the figures of each are from. Lengths and gaps are lognormal, by median and sigma. No trace
has the published requests themselves; `read_requests` takes a file that has.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bus.placement import MAX_LINKS, PIECE_TOKENS, PIECES_OF_A_LENGTH, Link, PromptChain
from penstock.names import PriorityClass
from penstock.plan.coarse import CoarseLoad
from penstock.plan.placing import PlacedRequest
from penstock.plan.trace import HASH_BLOCK_TOKENS, Arrival, read_trace

Segment = tuple[str, int]
"""A piece of a prompt that others may have as well: its name and its tokens."""
CHAT_MEMORY_S = 1500.0
"""So long before the trace the first chats begin: they go on in it."""
BURST_S, BURST_PERIOD_S = 10.0, 60.0
MAX_PROMPT_TOKENS = 126_000
"""A chat ends before its prompt is longer: so long is Mooncake's longest."""


@dataclass(frozen=True)
class Lengths:
    """A lognormal distribution."""

    median: float
    sigma: float

    def draw_number(self, rng: random.Random) -> float:
        """Return a number."""
        return self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))


@dataclass(frozen=True)
class Shape:
    """What a trace is made of."""

    source: str
    ttft_s: float
    """How long a first token may take."""
    first_message: Lengths
    """Tokens of a chat's first message, and of the later ones."""
    later_message: Lengths
    answer: Lengths
    continued_share: float
    """How many turns have another one behind them."""
    gap: Lengths
    """Seconds between two turns, of 1 s to 10 min."""
    num_systems: int = 0
    """How many system prompts there are. The n-th is chosen as often as 1/n**skew says."""
    system_tokens: int = 0
    skew: float = 0.0
    names_sessions: bool = False
    burst: float = 1.0
    """By what factor more chats begin in the first `BURST_S` of each `BURST_PERIOD_S` than in the rest."""
    changed_share: float = 0.0
    """How many chats change their session with each request, as they belong to an adversary."""


CHAT_GAP = Lengths(123.0, 1.03)
SHAPES: Mapping[str, Shape] = {
    "mooncake_conversation": Shape(
        "Mooncake FAST'25 conversation_trace: 12,031 requests in 59 minutes, prompts 6,909 at the median and 12,035 at "
        "the mean, answers 343, all with a first block of 512, 39% find more, 66 / 123 / 264 s later (quartiles); "
        "37% of the blocks are found",
        10.0, Lengths(4700, 1.25), Lengths(1800, 1.1), Lengths(290, 0.6), 0.38, CHAT_GAP, 1, 512,
    ),
    "mooncake_toolagent": Shape(
        "Mooncake FAST'25 toolagent_trace: 23,608 requests an hour, prompts 8,596 and answers 182 at the mean, 59% of "
        "the blocks found; how many tools' descriptions there are is not published",
        10.0, Lengths(2500, 0.9), Lengths(1200, 1.0), Lengths(130, 0.8), 0.24, CHAT_GAP, 24, 4000, 1.0,
    ),
    "azure_conversation": Shape(
        "Azure LLM inference 2023, conversation: prompts 1,020 and answers 129 at the median, 1,155 and 211 at the "
        "mean (the Splitwise paper); the trace names no beginnings",
        2.0, Lengths(1020, 0.5), Lengths(1, 0.1), Lengths(129, 1.0), 0.0, CHAT_GAP,
    ),
    "skewed": Shape(
        "made up: a hundred products, of which the largest has a quarter of the requests",
        4.0, Lengths(400, 0.8), Lengths(200, 0.8), Lengths(150, 0.7), 0.5, Lengths(30, 1.2), 100, 3000, 1.1,
    ),
    "bursty": Shape(
        "made up: chats with named sessions, six times as many in ten seconds of each minute",
        4.0, Lengths(1500, 0.9), Lengths(300, 0.8), Lengths(200, 0.7), 0.8, Lengths(30, 1.2), names_sessions=True,
        burst=6.0,
    ),
    "one_system_prompt": Shape(
        "made up: chats of one product, with a system prompt of 2,000 characters and no sessions",
        4.0, Lengths(1500, 0.9), Lengths(300, 0.8), Lengths(200, 0.7), 0.8, Lengths(30, 1.2), 1, 500,
    ),
    "adversary": Shape(
        "made up: chats with named sessions, a third of which name another session with each request",
        4.0, Lengths(1500, 0.9), Lengths(300, 0.8), Lengths(200, 0.7), 0.8, Lengths(30, 1.2), names_sessions=True,
        changed_share=1 / 3,
    ),
}  # fmt: skip


def make_requests(shape: Shape, rate: float, length_s: float, block_size: int, seed: int = 0) -> list[PlacedRequest]:
    """Return requests of `length_s` seconds, `rate` a second, by time. The same seed makes the same ones."""
    chats_per_s = rate * (1 - shape.continued_share)
    found: list[PlacedRequest] = []
    for name, end_s in (("later", length_s), ("earlier", -CHAT_MEMORY_S)):
        # A chat is the same at each rate, and about as far from the beginning, so that rates differ by little else.
        for number, begun_s in enumerate(_draw_starts(random.Random(f"{name} {seed}"), shape, chats_per_s, end_s)):
            rng = random.Random(f"{name} {seed} {number}")
            found += _make_chat(rng, shape, f"{name}-{seed}-{number}", begun_s, length_s, block_size)
    return sorted(found, key=lambda request: request.at_s)


def _draw_starts(rng: random.Random, shape: Shape, chats_per_s: float, end_s: float) -> Iterator[float]:
    """Yield when chats begin, from 0 to `end_s`, which may lie before it. In bursts there are more; the mean stays."""
    passed_s, share = 0.0, BURST_S / BURST_PERIOD_S
    peak = chats_per_s * shape.burst / (1 + share * (shape.burst - 1))
    while (passed_s := passed_s + rng.expovariate(peak)) < abs(end_s):
        at_s = math.copysign(passed_s, end_s)
        if at_s % BURST_PERIOD_S < BURST_S or rng.random() < 1 / shape.burst:
            yield at_s


def _make_chat(
    rng: random.Random, shape: Shape, name: str, at_s: float, length_s: float, block_size: int
) -> Iterator[PlacedRequest]:
    segments: list[Segment] = []
    if shape.num_systems:
        weights = list(accumulate((number + 1) ** -shape.skew for number in range(shape.num_systems)))
        system = rng.choices(range(shape.num_systems), cum_weights=weights)[0]
        segments.append((f"system {system}", shape.system_tokens))
    is_adversary, message, turn = rng.random() < shape.changed_share, shape.first_message, 0
    while True:
        segments.append((f"user {name}.{turn}", max(8, round(message.draw_number(rng)))))
        answer = (f"answer {name}.{turn}", max(1, round(shape.answer.draw_number(rng))))
        if sum(length for _, length in segments) > MAX_PROMPT_TOKENS:
            return
        if at_s >= 0:
            session = f"{name}.{turn}" if is_adversary else name if shape.names_sessions else None
            yield make_placed_request(f"{name}.{turn}", at_s, segments, answer, session, name, block_size)
        segments.append(answer)
        at_s += min(600.0, max(1.0, shape.gap.draw_number(rng)))
        message, turn = shape.later_message, turn + 1
        if rng.random() >= shape.continued_share or at_s >= length_s:
            return


def make_placed_request(
    request_id: str,
    at_s: float,
    segments: Sequence[Segment],
    answer: Segment,
    session: str | None,
    chat: str,
    block_size: int,
    priority_class: PriorityClass = "interactive",
) -> PlacedRequest:
    """Return the request whose prompt these segments are."""
    num_tokens, keys = sum(length for _, length in segments), name_blocks([*segments, answer], block_size)
    home = blake2b((session or chat).encode(), digest_size=16).digest()
    chain = PromptChain(priority_class, home, _chain_segments(segments), num_tokens, is_tokens=True)
    return PlacedRequest(request_id, at_s, num_tokens, answer[1], keys, session or "", chain, priority_class)


def _chain_segments(segments: Sequence[Segment]) -> tuple[Link, ...]:
    """Return the links of a chat whose messages are these segments, where `chain_prompt` sets them."""
    links, digest, end = list[Link](), blake2b(digest_size=12), 0
    for name, length in segments:
        start = 0
        while start < length and len(links) < MAX_LINKS:
            piece = min(length - start, PIECE_TOKENS << len(links) // PIECES_OF_A_LENGTH)
            digest.update(f"{name} {start} {piece}|".encode())
            start, end = start + piece, end + piece
            links.append(Link(digest.digest(), end))
    return tuple(links)


def name_blocks(segments: Sequence[Segment], block_size: int) -> tuple[bytes, ...]:
    """Return the keys of the full blocks of a text, each a hash over all of it up to the block's end."""
    keys: list[bytes] = []
    parent, parts, num_left = b"", "", block_size
    for name, length in segments:
        start = 0
        while length - start >= num_left:
            parent = blake2b(f"{parts}{name} {start} {num_left}".encode(), key=parent, digest_size=12).digest()
            keys.append(parent)
            start, parts, num_left = start + num_left, "", block_size
        if start < length:
            parts += f"{name} {start} {length - start}|"
            num_left -= length - start
    return tuple(keys)


def read_requests(file: Path, block_size: int) -> list[PlacedRequest]:
    """Return the requests of a trace in a file. Raises `PlanError`.

    Prompts share what their `hash_ids` say; without them nothing.
    """
    return [_make_recorded(str(number), one, block_size) for number, one in enumerate(read_trace(file))]


def _make_recorded(name: str, one: Arrival, block_size: int) -> PlacedRequest:
    left, segments = one.prompt_tokens, list[Segment]()
    for hash_id in one.hash_ids:
        segments.append((f"hash {hash_id}", min(left, HASH_BLOCK_TOKENS)))
        left -= segments[-1][1]
    segments += [(f"user {name}", left)] if left else []
    # Else what two requests share behind the first block shows that they are turns of one chat.
    chat = one.chat or (f"hash {one.hash_ids[1]}" if len(one.hash_ids) > 1 else name)
    answer = (f"answer {name}", max(1, one.output_tokens))
    return make_placed_request(name, one.at_s, segments, answer, None, chat, block_size, one.priority_class)


def draw_load(shape: Shape, rate: float, length_s: float, seed: int = 0) -> CoarseLoad:
    """Return requests as `make_requests` makes them, drawn all at once. Sessions are chats, also of an adversary."""
    rng = np.random.default_rng(seed)

    def draw(lengths: Lengths, count: int) -> NDArray[np.float64]:
        return lengths.median * np.exp(lengths.sigma * rng.standard_normal(count))

    peak = shape.burst / (1 + BURST_S / BURST_PERIOD_S * (shape.burst - 1))
    span_s = length_s + CHAT_MEMORY_S
    at_s = rng.uniform(-CHAT_MEMORY_S, length_s, rng.poisson(rate * (1 - shape.continued_share) * peak * span_s))
    at_s = at_s[(at_s % BURST_PERIOD_S < BURST_S) | (rng.random(len(at_s)) < 1 / shape.burst)]
    chat, system = np.arange(len(at_s)), np.zeros(len(at_s), np.int64)
    if shape.num_systems:
        weights = np.arange(1, shape.num_systems + 1) ** -shape.skew
        system = rng.choice(shape.num_systems, size=len(at_s), p=weights / weights.sum())
    earlier, message = np.full(len(at_s), shape.system_tokens * (shape.num_systems > 0)), shape.first_message
    turns = list[tuple[NDArray[Any], ...]]()
    while len(at_s):
        prompt = earlier + np.maximum(8, np.rint(draw(message, len(at_s)))).astype(np.int64)
        answer = np.maximum(1, np.rint(draw(shape.answer, len(at_s)))).astype(np.int64)
        goes_on = prompt <= MAX_PROMPT_TOKENS
        is_played = goes_on & (at_s >= 0)
        turns.append(tuple(one[is_played] for one in (at_s, prompt, answer, chat, earlier, system)))
        at_s = at_s + np.clip(draw(shape.gap, len(at_s)), 1.0, 600.0)
        goes_on &= (rng.random(len(at_s)) < shape.continued_share) & (at_s < length_s)
        at_s, chat, system, earlier = at_s[goes_on], chat[goes_on], system[goes_on], (prompt + answer)[goes_on]
        message = shape.later_message
    arrays: list[NDArray[Any]] = [np.concatenate(one) for one in zip(*turns, strict=True)]
    arrays.append(np.full(len(arrays[0]), shape.system_tokens if shape.num_systems else 0))
    order = np.argsort(arrays[0], kind="stable")
    return CoarseLoad(*[one[order] for one in arrays])


def list_requests(load: CoarseLoad, block_size: int) -> list[PlacedRequest]:
    """Return the same requests, as the simulation plays them."""
    segments, found = dict[int, list[Segment]](), list[PlacedRequest]()
    rows = zip(*(one.tolist() for one in vars(load).values()), strict=True)
    for number, (at_s, prompt, output, chat, earlier, system, system_tokens) in enumerate(rows):
        mine = segments.setdefault(chat, [(f"system {system}", system_tokens)] if system_tokens else [])
        num_told = sum(length for _, length in mine)
        if num_told < earlier:  # turns before the trace
            mine.append((f"earlier {chat}", earlier - num_told))
        mine.append((f"user {number}", prompt - earlier))
        answer = (f"answer {number}", output)
        found.append(make_placed_request(f"{number}", at_s, mine, answer, None, f"{chat}", block_size))
        mine.append(answer)
    return found
