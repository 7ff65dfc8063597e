"""Consistency checks of an arena, for tests and for finding leaks."""

import time

import numpy as np

from penstock.kvstore.arena.arena import Arena
from penstock.kvstore.arena.layout import (
    FREE,
    NO_SLOT,
    READY,
    W_ALLOCATED,
    W_FREE_HEAD,
    W_LEASE_TOP,
    W_NEXT_LEASE_END,
    W_NUM_FREE,
    W_NUM_READY,
    WRITING,
    Tables,
)
from penstock.kvstore.arena.locks import FIRST_OWNER_BYTE, ByteLocks


def check_integrity(arena: Arena) -> list[str]:
    """Return the problems, in words. Call `Arena.reclaim_stale` before, because slots of dead owners are problems."""
    with arena.hold_tables() as locks:
        tables = arena.tables
        return (
            _check_free_list(tables)
            + _check_index(tables)
            + _check_leases(tables)
            + _check_writers(tables, locks, arena.owner)
        )


def _check_free_list(tables: Tables) -> list[str]:
    """Check that each slot is on the free list, being written, ready, or without memory yet."""
    words, wrong = tables.words, []
    listed: list[int] = []
    slot = words[W_FREE_HEAD]
    while slot != NO_SLOT and len(listed) <= tables.geometry.num_slots:
        listed.append(slot)
        slot = tables.next_free[slot]
    free = np.flatnonzero(tables.state_array[: words[W_ALLOCATED]] == FREE).tolist()
    if sorted(listed) != free:
        wrong.append(f"on the free list: {sorted(listed)}, free: {free}")
    if words[W_NUM_FREE] != len(free):
        wrong.append(f"{words[W_NUM_FREE]} slots are counted as free, {len(free)} are")
    if (tables.state_array[words[W_ALLOCATED] :] != FREE).any():
        wrong.append("a slot without memory is in use")
    return wrong


def _check_index(tables: Tables) -> list[str]:
    """Check that the index has each ready slot once, where it is found, and that no key has two slots."""
    wrong = []
    ready = np.flatnonzero(tables.state_array == READY).tolist()
    held = sorted(place - 1 for place in tables.index.tolist() if place)
    if held != ready:
        wrong.append(f"in the index: {held}, ready: {ready}")
    keys = [tables.slot_key(slot) for slot in ready]
    if len(set(keys)) != len(keys):
        wrong.append("a key has two slots")
    if tables.words[W_NUM_READY] != len(ready):
        wrong.append(f"{tables.words[W_NUM_READY]} slots are counted as ready, {len(ready)} are")
    mask = len(tables.index) - 1
    for slot, key in zip(ready, keys, strict=True):
        at = int.from_bytes(key[:8], "little") & mask
        while tables.index[at] not in (0, slot + 1):
            at = (at + 1) & mask
        if not tables.index[at]:
            wrong.append(f"slot {slot} is not found by its key")
    return wrong


def _check_leases(tables: Tables) -> list[str]:
    """Check that leases are on stored blocks, are counted, and none is beyond the table's end or expired."""
    wrong = []
    rows = np.flatnonzero(tables.lease_end_array)
    slots = tables.lease_slot_array[rows]
    if (tables.state_array[slots] != READY).any():
        wrong.append("a lease on a slot that is not ready")
    if (tables.generation_array[slots] != tables.lease_generation_array[rows]).any():
        wrong.append("a lease on a block that is gone")
    if (np.bincount(slots, minlength=tables.geometry.num_slots) != tables.lease_count_array).any():
        wrong.append("leases are counted wrong")
    if len(set(zip(slots.tolist(), tables.lease_owner_array[rows].tolist(), strict=True))) != len(rows):
        wrong.append("an owner has two leases on a slot")
    if len(rows) and rows[-1] >= tables.words[W_LEASE_TOP]:
        wrong.append("a lease is beyond the end of the table")
    ends = tables.lease_end_array[rows]
    if len(rows) and ends.min() < tables.words[W_NEXT_LEASE_END]:
        wrong.append("a lease ends before the next end")
    if (ends < time.monotonic_ns() - 10**9).any():
        wrong.append("a lease was not ended in time")
    return wrong


def _check_writers(tables: Tables, locks: ByteLocks, mine: int) -> list[str]:
    """Check that the owners of slots being written are alive."""
    owners = np.unique(tables.owner_array[tables.state_array == WRITING]).tolist()
    dead = [owner for owner in owners if owner != mine and not locks.is_held_elsewhere(FIRST_OWNER_BYTE + owner)]
    return [f"owner {owner} is dead and has slots" for owner in dead]
