"""The lock over an arena's tables: first among this process's threads, then among all processes.

A flag is set during a change. A holder of the lock that finds it set rebuilds what follows from the slot table.
"""

import threading
from types import TracebackType

from penstock.failpoints import tier_failpoint
from penstock.kvstore.arena.layout import W_DIRTY
from penstock.kvstore.arena.locks import ByteLocks
from penstock.kvstore.arena.slots import SlotTable


class TablesLock:
    """`with lock as is_open:` holds the lock over consistent tables; `is_open` is False once this opening is closed."""

    def __init__(self, slots: SlotTable, locks: ByteLocks) -> None:
        self.words = slots.words
        self.num_writing = 0
        """Slots that threads of this process are writing. Closing waits for them."""
        self._slots, self._locks = slots, locks
        self._threads = threading.Condition(threading.Lock())
        self._is_closed = self._is_held = False

    @property
    def is_held(self) -> bool:
        """Whether the tables may be used. They may not after the arena was closed."""
        return self._is_held

    def __enter__(self) -> bool:
        self._threads.acquire()
        try:
            self._is_held = not self._is_closed or self.num_writing > 0
            if self._is_held:
                self._locks.lock_metadata()
                if self.words[W_DIRTY]:
                    self._slots.rebuild_tables()
                    self.words[W_DIRTY] = 0
                    tier_failpoint(self._slots.tier, "rebuild.4")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return not self._is_closed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._is_held:
            self._is_held = False
            self._locks.unlock_metadata()
        self._threads.release()

    def finish_writes(self, count: int) -> None:
        """Record that `count` slots were written. Called under the lock."""
        self.num_writing -= count
        self._threads.notify_all()

    def close(self) -> bool:
        """Refuse further use, and wait for slots being written. Return False if it was closed before."""
        with self._threads:
            if self._is_closed:
                return False
            self._is_closed = True
            self._threads.wait_for(lambda: not self.num_writing)
            return True


class TablesChange:
    """`with change as is_open:` holds the lock for a change. If the change raises, the tables are rebuilt."""

    def __init__(self, guard: TablesLock) -> None:
        self._guard = guard

    def __enter__(self) -> bool:
        is_open = self._guard.__enter__()
        if self._guard.is_held:
            self._guard.words[W_DIRTY] = 1
        return is_open

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._guard.is_held and kind is None:
            self._guard.words[W_DIRTY] = 0
        self._guard.__exit__(kind, error, where)
