"""KV from one engine to another as bytes, without a store between them: for proofs, tests and measurements."""

from collections.abc import Sequence as Items

from penstock.engine.engine import Engine
from penstock.engine.sequence import Payload, Sequence


def export_blocks(engine: Engine, seq: Sequence, num_blocks: int | None = None) -> list[bytes]:
    """Copies of the sequence's first blocks, by default of all that hold its prompt."""
    count = -(-seq.num_prompt_tokens // engine.settings.block_size) if num_blocks is None else num_blocks
    copies = []
    for index in range(count):
        lent = engine.pin_block(seq, index)
        copies.append(bytes(lent.payload))
        engine.unpin_block(lent)
    return copies


def import_blocks(engine: Engine, seq: Sequence, payloads: Items[Payload]) -> int:
    """Give the engine the KV of a sequence's first blocks, before it is added: how many full ones it has now.

    Those with keys land in the pool, as far as there is room; the prompt's partial block becomes the tail.
    """
    landing = engine.stage_blocks(seq.block_keys[: len(payloads)])
    if landing is None:
        return engine.count_cached_blocks(seq.block_keys[: len(payloads)])
    for view, payload in zip(landing.views, payloads[landing.num_cached :], strict=False):
        view[:] = payload
    count = landing.num_cached + len(landing.views)
    engine.commit_staged_blocks(landing, len(landing.views))
    index, num_rows = divmod(seq.num_prompt_tokens, engine.settings.block_size)
    if num_rows and len(payloads) == index + 1:
        seq.tail_payload = payloads[index]
    return count
