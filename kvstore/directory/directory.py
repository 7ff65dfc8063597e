"""What changes in the directory, each in one holding of its lock; the steps are those of the tier."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.directory import leases, steps, writers
from kvstore.directory.eviction import Eviction
from kvstore.directory.layout import Layout, make_folder, room, unlink
from kvstore.directory.ledger import Ledger


class Draft(NamedTuple):
    """A file that has room and is not found yet."""

    path: str
    size: int
    """What is reserved for it."""


class Directory:
    """A directory of blocks within a budget. Raises `OSError` where the file system fails."""

    def __init__(self, root: Path, budget: int, *, writes: bool) -> None:
        self.layout, self.budget = Layout(root), budget
        self.ledger = Ledger(self.layout)
        self._eviction = Eviction(self.layout, self.ledger, budget)
        self._writer: writers.Writer | None = None
        if writes:
            self._begin()

    @property
    def is_writable(self) -> bool:
        """Whether blocks can be put; not by tools, and not after closing."""
        return self._writer is not None

    @property
    def num_evicted(self) -> int:
        """Blocks put out by this object."""
        return self._eviction.num_evicted

    def _begin(self) -> None:
        """1. A folder of our own, so that it is known what is ours; 2. the dead ones' go; 3. the budget is kept."""
        with self.ledger.held() as record:
            self.ledger.change()
            self._writer = writers.Writer(self.layout)
            steps.reached("open 1")
            record.used -= writers.bury(self.layout)
            leases.tidy(self.layout)
            steps.reached("open 2")
            record.budget = self.budget
            self._eviction.make_room(0)
            steps.reached("open 3")

    def reserve(self, lengths: Sequence[int]) -> list[Draft | None]:
        """Step 1 of a put: where to write files of these lengths, None for one that there is no room for."""
        drafts = list[Draft | None]()
        with self.ledger.held() as record:
            try:
                for size in map(room, lengths):
                    if self._writer is None or not self._eviction.make_room(size):
                        drafts.append(None)
                        continue
                    self.ledger.change()
                    self._writer.reserve(size)
                    steps.reached("put 1.1")
                    record.used += size
                    drafts.append(Draft(self._writer.new_file(), size))
                    steps.reached("put 1.2")
            except OSError:
                if self._writer is not None:
                    self._writer.reserve(-sum(draft.size for draft in drafts if draft is not None))
                raise  # and the next holder counts anew
        return drafts

    def publish(self, drafts: Mapping[Draft, bytes | None]) -> int:
        """Step 4 of a put: drafts get the name of a key, or go; how many blocks are new.

        Raises `OSError` after all of them if one could not get its name.
        """
        num_new, failure = 0, None
        with self.ledger.held() as record:
            if self._writer is None:
                raise FileNotFoundError("closed meanwhile, and the drafts are gone")
            self.ledger.change()
            steps.reached("put 4.1")
            for draft, key in drafts.items():
                try:
                    is_new = key is not None and self._name(draft, self.layout.block(key))
                except OSError as error:
                    is_new, failure = False, error
                if is_new:
                    num_new, record.blocks = num_new + 1, record.blocks + 1
                    steps.reached("put 4.2")
                else:
                    unlink(draft.path)
                    record.used -= draft.size
                self._writer.reserve(-draft.size)
                steps.reached("put 4.3")
            record.changes += 1
        if failure is not None:
            raise failure
        return num_new

    def _name(self, draft: Draft, path: str) -> bool:
        """Give it its name, unless somebody else wrote the same block meanwhile."""
        if os.path.exists(path):
            return False
        make_folder(os.path.dirname(path))
        os.rename(draft.path, path)
        return True

    def lease(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """See `Tier.lease`."""
        with self.ledger.held() as record:
            self.ledger.change()
            leases.lease(self.layout, owner, keys, seconds)
            record.changes += 1
            steps.reached("lease 2")

    def release(self, owner: str, keys: Sequence[bytes]) -> None:
        """See `Tier.release`."""
        with self.ledger.held() as record:
            self.ledger.change()
            leases.release(self.layout, owner, keys)
            record.changes += 1
            steps.reached("release 2")

    def drop(self, keys: Mapping[bytes, int | None]) -> int:
        """Remove blocks, leased or not; with a file's number, only if it is still that file. How many."""
        with self.ledger.held() as record:
            mine = {}
            for key, number in keys.items():
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(self.layout.block(key))
                    if number is None or number == stat.st_ino:
                        mine[key] = stat
            if not mine:
                return 0
            self.ledger.change()
            steps.reached("remove 1")
            if any(stat.st_nlink > 1 for stat in mine.values()):
                leases.forget(self.layout, set(mine))
            steps.reached("remove 2")
            for key, stat in mine.items():
                unlink(self.layout.block(key))
                record.used -= room(stat.st_size)
                record.blocks -= 1
                steps.reached("remove 3")
            record.changes += 1
            if any(keys.values()):
                self.ledger.count()  # a damaged file may have had another size when it was written
            return len(mine)

    def close(self) -> None:
        """Give up the folder and what is reserved. Twice is harmless."""
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                with self.ledger.held() as record:
                    self.ledger.change()
                    record.used -= writer.close()
        finally:
            self.ledger.close()
