"""Copy KV from one engine to another as bytes, without a store: for proofs, tests and benchmarks."""

from collections.abc import Sequence as Items

from penstock.engine.engine import Engine
from penstock.engine.sequence import Payload, Sequence


def export_blocks(engine: Engine, seq: Sequence, num_blocks: int | None = None) -> list[bytes]:
    """Return copies of the sequence's first `num_blocks` blocks, by default of all that hold its prompt."""
    count = -(-seq.num_prompt_tokens // engine.settings.block_size) if num_blocks is None else num_blocks
    copies = []
    for pinned in engine.pin_blocks(seq, range(count)):
        copies.append(bytes(pinned.payload))
        engine.unpin_block(pinned)
    return copies


def export_state(engine: Engine, seq: Sequence) -> bytes | None:
    """Return a copy of what layers without KV keep of the sequence's prompt; None if there is none."""
    if engine.states is None:
        return None
    pinned = engine.states.pin_parts(seq, seq.num_prompt_tokens, engine.states.layout.row_bytes)
    state = bytes(pinned[0].payload) if pinned else None
    for part in pinned:
        engine.unpin_block(part)
    return state


def import_state(engine: Engine, seq: Sequence, state: bytes | None) -> None:
    """Load what layers without KV keep of a sequence's prompt into an engine, before the sequence is added."""
    if engine.states is not None and state is not None:
        engine.states.add_snapshot(seq, seq.num_prompt_tokens, state)


def import_blocks(engine: Engine, seq: Sequence, payloads: Items[Payload]) -> int:
    """Load the KV of a sequence's first blocks into an engine, before the sequence is added.

    Full blocks go to the pool as far as they fit; the prompt's partial block becomes the tail payload. Returns how
    many full blocks the pool holds now.
    """
    staged = engine.stage_blocks(seq.block_keys[: len(payloads)])
    if staged is None:
        return engine.pool.count_cached_prefix(seq.block_keys[: len(payloads)])
    for view, payload in zip(staged.views, payloads[staged.num_cached :], strict=False):
        view[:] = payload
    count = staged.num_cached + len(staged.views)
    engine.commit_staged_blocks(staged, len(staged.views))
    index, num_rows = divmod(seq.num_prompt_tokens, engine.settings.block_size)
    if num_rows and len(payloads) == index + 1:
        seq.tail_payload = payloads[index]
    return count
