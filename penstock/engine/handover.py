"""KV from one engine to another as bytes, without a store between them: for proofs, tests and measurements."""

from collections.abc import Sequence as Items

from penstock.engine.engine import Engine
from penstock.engine.sequence import Payload, Sequence


def taken(engine: Engine, seq: Sequence, num_blocks: int | None = None) -> list[bytes]:
    """Copies of the sequence's first blocks, by default of all that hold its prompt."""
    count = -(-seq.num_prompt // engine.settings.block_size) if num_blocks is None else num_blocks
    copies = []
    for index in range(count):
        lent = engine.lend(seq, index)
        copies.append(bytes(lent.payload))
        engine.give_back(lent)
    return copies


def landed(engine: Engine, seq: Sequence, payloads: Items[Payload]) -> int:
    """Give the engine the KV of a sequence's first blocks, before it is added: how many full ones it has now.

    Those with keys land in the pool, as far as there is room; the prompt's partial block becomes the tail.
    """
    landing = engine.land(seq.prefix_keys[: len(payloads)])
    if landing is None:
        return engine.cached_blocks(seq.prefix_keys[: len(payloads)])
    for view, payload in zip(landing.views, payloads[landing.held :], strict=False):
        view[:] = payload
    count = landing.held + len(landing.views)
    engine.close_landing(landing, len(landing.views))
    index, num_rows = divmod(seq.num_prompt, engine.settings.block_size)
    if num_rows and len(payloads) == index + 1:
        seq.tail = payloads[index]
    return count
