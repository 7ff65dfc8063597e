"""What changes in the directory, each in one holding of its lock; the steps are those of the tier."""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.kvstore import steps
from penstock.kvstore.directory import leases, writers
from penstock.kvstore.directory.eviction import Eviction
from penstock.kvstore.directory.layout import PAGE, Layout, make_folder, room, unlink
from penstock.kvstore.directory.ledger import Ledger, Record

log = logging.getLogger(__name__)

T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where there is less room than the budget."""
FEW_BYTES = 4 * PAGE
"""What folders and a small file take."""


class Draft(NamedTuple):
    """A file that has room and is not found yet."""

    path: str
    size: int
    """What is reserved for it."""


class Directory:
    """A directory of blocks within a budget. Raises `OSError` where the file system fails."""

    def __init__(self, root: Path, budget: int, *, writes: bool) -> None:
        self.layout, self.budget = Layout(root), budget
        self.is_writable = writes
        """Whether blocks can be put; not by tools, and not after closing."""
        self.ledger = Ledger(self.layout, makes=writes)
        self._eviction = Eviction(self.layout, self.ledger, budget)
        self._writer: writers.Writer | None = None
        try:
            if writes:
                self._begin()
        except OSError as error:
            if error.errno not in FULL:
                with contextlib.suppress(OSError):
                    self.close()
                raise
            log.warning("the disk is full, no KV blocks are written to %s until it has room: %s", root, error)

    @property
    def num_evicted(self) -> int:
        """Blocks put out by this object."""
        return self._eviction.num_evicted

    def _begin(self) -> None:
        """1. A folder of our own, so that it is known what is ours; 2. the dead ones' go; 3. the budget is kept."""
        with self.ledger.held() as record:
            if self._writer is not None or not self.is_writable:
                return
            self.ledger.change()
            self._writer = self._with_room(partial(writers.Writer, self.layout))
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
        if self._writer is None:
            self._begin()
        with self._writing(drafts) as (writer, record):
            record.used += writer.settle()
            for size in map(room, lengths):
                if not self._eviction.make_room(size):
                    drafts.append(None)
                    continue
                drafts.append(Draft(writer.new_draft(size), size))
                more = writer.settle()
                steps.reached("put 1.1")
                record.used += more
                steps.reached("put 1.2")
        return drafts

    def publish(self, drafts: Mapping[Draft, bytes | None]) -> int:
        """Step 4 of a put: drafts get the name of a key, or go; how many blocks are new.

        Raises `OSError` after all of them if one could not get its name.
        """
        num_new, failure = 0, None
        with self._writing(drafts) as (writer, record):
            steps.reached("put 4.1")
            for draft, key in drafts.items():
                try:
                    is_new = key is not None and self._with_room(partial(self._name, draft, key))
                except OSError as error:
                    is_new, failure = False, error
                if is_new:
                    writer.named(draft.path)
                    num_new, record.blocks, record.used = num_new + 1, record.blocks + 1, record.used + draft.size
                    steps.reached("put 4.2")
                else:
                    writer.give_up([draft.path])
                record.used += writer.settle()
                steps.reached("put 4.3")
            record.changes += 1
        if failure is not None:
            raise failure
        return num_new

    def relieve(self, draft: Draft, num_bytes: int) -> bool:
        """The disk is full, so a draft could not be written: it goes, and blocks of so many bytes; whether any did."""
        with self.ledger.held():
            unlink(draft.path)
            return self._eviction.free(num_bytes)

    @contextlib.contextmanager
    def _writing(self, drafts: Iterable[Draft | None]) -> Iterator[tuple[writers.Writer, Record]]:
        """The lock, for a change of our drafts. If that fails as a whole they are given up."""
        writer = self._writer
        try:
            with self.ledger.held() as record:
                if writer is None or writer is not self._writer:
                    raise FileNotFoundError("closed meanwhile, and the drafts are gone")
                self.ledger.change()
                try:
                    yield writer, record
                except BaseException:
                    writer.give_up(draft.path for draft in drafts if draft is not None)
                    with contextlib.suppress(OSError):
                        writer.settle()  # and the next holder counts anew
                    raise
        except BaseException:  # the lock, or the record: what is given up goes with the next put
            if writer is not None:
                writer.give_up(draft.path for draft in drafts if draft is not None)
            raise

    def _with_room(self, call: Callable[[], T]) -> T:
        """Make folders and links; where the disk is full, once more when blocks have gone. Under the lock."""
        try:
            return call()
        except OSError as error:
            if error.errno not in FULL or not self._eviction.free(FEW_BYTES):
                raise
        return call()

    def _name(self, draft: Draft, key: bytes) -> bool:
        """Give it its name, unless somebody else wrote the same block meanwhile."""
        path = self.layout.block(key)
        if os.path.exists(path):
            return False
        make_folder(os.path.dirname(path))
        os.rename(draft.path, path)
        return True

    def lease(self, owner: str, keys: Sequence[bytes], seconds: float) -> None:
        """See `Tier.lease`."""
        with self.ledger.held() as record:
            self.ledger.change()
            self._with_room(partial(leases.lease, self.layout, owner, keys, seconds))
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
        writer, self._writer, self.is_writable = self._writer, None, False
        try:
            if writer is not None:
                with self.ledger.held() as record:
                    self.ledger.change()
                    record.used -= writer.close()
        finally:
            self.ledger.close()
