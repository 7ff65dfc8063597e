"""Consistency checks of a directory, for tests and long runs."""

from penstock.kvstore.directory import leases, writers
from penstock.kvstore.directory.directory import Directory
from penstock.kvstore.directory.layout import list_entries, parse_key, round_to_pages


def check_directory(directory: Directory) -> list[str]:
    """Return what is wrong, in words. Holds the lock meanwhile."""
    layout = directory.layout
    with directory.ledger.hold_lock() as record:
        sizes = [round_to_pages(stat.st_size) for _, stat in layout.list_blocks()]
        used = sum(sizes) + writers.count_reserved_bytes(layout)
        wrong = [f"a dead process left {path}" for path in writers.find_dead_writers(layout)]
        wrong += [f"no lease of a block that is here: {path}" for path in leases.find_stray_leases(layout)]
        if (record.used_bytes, record.num_blocks) != (used, len(sizes)):
            wrong.append(
                f"{record.used_bytes} bytes, {record.num_blocks} blocks are recorded; there are {used}, {len(sizes)}"
            )
        if used > record.budget_bytes:
            wrong.append(f"{used} bytes are over the budget of {record.budget_bytes}")
        for folder in list_entries(layout.root):
            if folder.is_dir() and len(folder.name) == 2:
                wrong += [
                    f"not a block: {e.path}" for e in list_entries(folder.path) if parse_key(e.name, ".kv") is None
                ]
        return wrong
