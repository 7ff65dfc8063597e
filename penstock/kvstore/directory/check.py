"""Whether a directory is as it should be: for tests, and for those who let it run for long."""

from penstock.kvstore.directory import leases, writers
from penstock.kvstore.directory.directory import Directory
from penstock.kvstore.directory.layout import entries, key_of, room


def check(directory: Directory) -> list[str]:
    """What is wrong, in words. The lock is held meanwhile."""
    layout = directory.layout
    with directory.ledger.held() as record:
        sizes = [room(stat.st_size) for _, stat in layout.blocks()]
        used = sum(sizes) + writers.reserved(layout)
        wrong = [f"a dead process left {path}" for path in writers.dead(layout)]
        wrong += [f"no lease of a block that is here: {path}" for path in leases.astray(layout)]
        if (record.used, record.blocks) != (used, len(sizes)):
            wrong.append(f"{record.used} bytes, {record.blocks} blocks are recorded; there are {used}, {len(sizes)}")
        if used > record.budget:
            wrong.append(f"{used} bytes are over the budget of {record.budget}")
        for folder in entries(layout.root):
            if folder.is_dir() and len(folder.name) == 2:
                wrong += [f"not a block: {e.path}" for e in entries(folder.path) if key_of(e.name, ".kv") is None]
        return wrong
