"""Virtual time, and threads of which one runs at a time: what runs next, and when, follows from a seed.

A thread is a greenlet. It runs until it waits for something, then the world chooses another one that can run. When none
can, the clock goes forward to the next time that one waits for. A process is a set of threads with a clock of its own;
when it is killed, its threads are never resumed, wherever they were.

Modules of the product are not changed for this. `install` puts doubles in the place of `time`, `threading`, `queue`,
`random`, `secrets`, `uuid` and `ThreadPoolExecutor` in each module that has imported one of them.
"""

import asyncio
import contextlib
import heapq
import itertools
import random
import secrets
import sys
import threading
import time
import types
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

import greenlet

from penstock.testing.doubles import replace_values

EPOCH_S = 1_800_000_000.0
"""The wall clock at the beginning."""
TURN_S = 20e-6
"""The longest time that a thread computes before it waits for something, if nothing else is said."""
FUTURE_POLL_S = 0.005
"""How often futures are looked at that a thread waits for."""
Ticket = tuple["Thread", int]
"""A thread, and the number of its wait."""


@dataclass(eq=False)
class Process:
    """A process of the world: it lives until it is killed."""

    name: str
    clock_ahead_s: float = 0.0
    is_alive: bool = True
    stands_until_s: float = 0.0
    """Until when it stands still, as if it had been stopped."""
    threads: list["Thread"] = field(default_factory=list)
    on_failure: Callable[["Process", BaseException], None] | None = None
    """Called with an exception that ends one of its threads."""


class World:
    """The clock, and all threads."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        """Decides what runs next. Whatever else is decided by chance has a generator of its own."""
        self.now_s = 0.0
        self.num_turns = 0
        self._ready: list[Thread] = []
        self._timers: list[tuple[float, int, Thread, int]] = []
        self._numbers = itertools.count()
        self._threads: list[Thread] = []
        """All that there ever were. One of a dead process that were freed would run to its end, in its `finally`s."""
        self.main = greenlet.getcurrent()
        self.current: Thread | None = None
        self.outside = Process("outside")

    # What threads call.

    def wait(self, timeout_s: float | None = None) -> bool:
        """Let others run until this thread is woken, or the time is over. Return whether it was woken."""
        thread = self.current
        assert thread is not None, "only a thread of the world can wait"
        thread.wait_number += 1
        thread.is_waiting, thread.was_woken = True, False
        if timeout_s is not None:
            due_s = self.now_s + max(0.0, timeout_s)
            heapq.heappush(self._timers, (due_s, next(self._numbers), thread, thread.wait_number))
        self.main.switch()
        return thread.was_woken

    def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        self.wait(seconds)

    def yield_turn(self) -> None:
        """Let others run: the time for which this thread has computed passes."""
        self.wait(self.random.uniform(0.0, TURN_S))

    # What anything calls.

    def make_ticket(self) -> Ticket:
        """Return what wakes the thread that runs from its next `wait`."""
        assert self.current is not None, "only a thread of the world can wait"
        return self.current, self.current.wait_number + 1

    def wake(self, ticket: Ticket) -> None:
        """Let a thread run that waits. Does nothing if that wait is over."""
        thread, number = ticket
        if thread.is_waiting and thread.wait_number == number and thread.process.is_alive:
            thread.is_waiting, thread.was_woken = False, True
            self._ready.append(thread)

    def start_thread(self, process: Process, name: str, run: Callable[[], object]) -> "Thread":
        """Start a thread of a process."""
        thread = Thread(self, process, name, run)
        process.threads.append(thread)
        self._threads.append(thread)
        self._ready.append(thread)
        return thread

    def kill(self, process: Process) -> None:
        """End a process at once. If it is the caller's, this does not return."""
        process.is_alive = False
        for thread in process.threads:
            thread.is_over = True
            for other in thread.joiners:
                self.wake(other)
        if self.current is not None and self.current.process is process:
            self.main.switch()

    # What the one who drives it calls.

    def run(self, until: Callable[[], object], max_s: float) -> bool:
        """Run until a condition is true, or `max_s` are over. Return whether it is true. It is looked at often."""
        end_s = self.now_s + max_s
        while not until():
            if not self._run_turn(end_s):
                return bool(until())
        return True

    def _run_turn(self, end_s: float) -> bool:
        """Run one thread until it waits. Return False where the time is over, or nothing can run any more."""
        while not self._ready:
            if not self._timers or self._timers[0][0] > end_s:
                self.now_s = max(self.now_s, end_s)
                return False
            due_s, _, thread, number = heapq.heappop(self._timers)
            if thread.is_waiting and thread.wait_number == number and thread.process.is_alive:
                self.now_s = max(self.now_s, due_s)
                thread.is_waiting = False
                self._ready.append(thread)
        place = self.random.randrange(len(self._ready)) if len(self._ready) > 1 else 0
        self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
        thread = self._ready.pop()
        if thread.process.is_alive and thread.process.stands_until_s > self.now_s:
            thread.is_waiting = True
            due_s = thread.process.stands_until_s
            heapq.heappush(self._timers, (due_s, next(self._numbers), thread, thread.wait_number))
        elif thread.process.is_alive:
            self.num_turns += 1
            self.current = thread
            thread.switch_to()
            self.current = None
        return True


class Thread:
    """A thread of the world."""

    def __init__(self, world: World, process: Process, name: str, run: Callable[[], object]) -> None:
        self._world, self.process, self.name, self._run = world, process, name, run
        self.is_waiting = self.was_woken = self.is_over = False
        self.wait_number = 0
        self.joiners: list[Ticket] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that it runs."""
        self._hooks: Any = (None, None)
        self.greenlet = greenlet.greenlet(self._run_to_end, world.main)

    def switch_to(self) -> None:
        """Let it run until it waits. What asyncio keeps for each thread of the system is the thread's own meanwhile."""
        if self.loop is None:
            self.greenlet.switch()
        else:
            asyncio._set_running_loop(self.loop)  # noqa: SLF001  # what loops that are no subclass call
            sys.set_asyncgen_hooks(*self._hooks)
            self.greenlet.switch()
        if self.loop is not None:
            self._hooks = sys.get_asyncgen_hooks()
            asyncio._set_running_loop(None)  # noqa: SLF001
            sys.set_asyncgen_hooks(None, None)

    def _run_to_end(self) -> None:
        try:
            self._run()
        except greenlet.GreenletExit:
            raise
        except BaseException as error:
            if self.process.on_failure is None:
                raise
            self.process.on_failure(self.process, error)
        finally:
            self.is_over = True
            for other in self.joiners:
                self._world.wake(other)


class Doubles:
    """The doubles of modules whose functions need threads, clocks or chance."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.chance = random.Random(world.random.random())
        """What the product draws."""
        doubles = self
        self.time = types.SimpleNamespace(
            monotonic=self.read_monotonic, time=self.read_wall_clock, sleep=world.sleep,
            time_ns=lambda: int(doubles.read_wall_clock() * 1e9), perf_counter=self.read_monotonic,
            thread_time=self.read_monotonic, monotonic_ns=lambda: int(doubles.read_monotonic() * 1e9),
            gmtime=time.gmtime, strftime=time.strftime,
        )  # fmt: skip
        self.threading = types.SimpleNamespace(
            Thread=self._bind(SimThread), Event=self._bind(SimEvent), Lock=self._bind(SimLock),
            RLock=self._bind(SimLock), Condition=self._bind(SimCondition), Timer=self._bind(SimTimer),
            get_ident=lambda: id(world.current), current_thread=lambda: world.current,
            local=threading.local,
        )  # fmt: skip
        self.queue = types.SimpleNamespace(SimpleQueue=self._bind(SimQueue), Queue=self._bind(SimQueue), Empty=Empty)
        self.random = types.SimpleNamespace(
            uniform=self.chance.uniform, random=self.chance.random, getrandbits=self.chance.getrandbits,
            Random=random.Random, choice=self.chance.choice,
        )  # fmt: skip
        self.secrets = types.SimpleNamespace(
            token_hex=lambda size: self.chance.getrandbits(8 * size).to_bytes(size, "big").hex(),
            randbelow=self.chance.randrange,
            compare_digest=secrets.compare_digest,
        )
        self.uuid = types.SimpleNamespace(uuid4=lambda: uuid.UUID(int=self.chance.getrandbits(128), version=4))
        self._by_id: dict[int, Any] = {
            id(time): self.time, id(threading): self.threading, id(sys.modules["queue"]): self.queue,
            id(random): self.random, id(secrets): self.secrets, id(uuid): self.uuid,
            id(ThreadPoolExecutor): self._bind(SimPool), id(time.monotonic): self.read_monotonic,
            id(time.time): self.read_wall_clock, id(threading.Thread): self.threading.Thread,
            id(wait): self.wait_for_futures,
        }  # fmt: skip

    def _bind(self, made: type) -> Callable[..., Any]:
        return lambda *args, **kwargs: made(self.world, *args, **kwargs)

    def read_monotonic(self) -> float:
        """Return the monotonic clock, which all processes share."""
        return self.world.now_s

    def read_wall_clock(self) -> float:
        """Return the wall clock of the process that runs."""
        process = self.world.current.process if self.world.current is not None else self.world.outside
        return EPOCH_S + self.world.now_s + process.clock_ahead_s

    def wait_for_futures(self, futures: Sequence[Any], timeout: float) -> tuple[set[Any], set[Any]]:
        """Wait for futures as `concurrent.futures.wait` does."""
        end_s = self.world.now_s + timeout
        while not all(future.done() for future in futures) and self.world.now_s < end_s:
            self.world.sleep(FUTURE_POLL_S)
        done = {future for future in futures if future.done()}
        return done, set(futures) - done

    def install_server_clock(self, prefix: str) -> "contextlib.AbstractContextManager[None]":
        """Let modules, which have these doubles already, read a clock of the server's own, whoever asks it."""
        clock = types.SimpleNamespace(**vars(self.time) | {"time": lambda: EPOCH_S + self.world.now_s})
        return self.install(prefix, [(self.time, clock)])

    def install(
        self, prefix: str | tuple[str, ...], others: Sequence[tuple[object, object]] = ()
    ) -> "contextlib.AbstractContextManager[None]":
        """Let all loaded modules whose names begin so have these doubles, and the second of each of `others` in the
        place of the first.
        """
        return replace_values(prefix, self._by_id | {id(original): double for original, double in others})


class SimThread:
    """`threading.Thread`."""

    def __init__(
        self, world: World, group: None = None, target: Callable[..., object] = lambda: None, name: str = "",
        args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *, daemon: bool | None = None,
    ) -> None:  # fmt: skip
        self._world, self._run, self.name = world, lambda: target(*args, **(kwargs or {})), name
        self.daemon = daemon
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start it, in the process that runs."""
        process = self._world.current.process if self._world.current is not None else self._world.outside
        self._thread = self._world.start_thread(process, self.name, self._run)

    def is_alive(self) -> bool:
        """Return whether it has begun and not ended."""
        return self._thread is not None and not self._thread.is_over

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        if self._thread is None or self._thread.is_over:
            return
        self._thread.joiners.append(self._world.make_ticket())
        self._world.wait(timeout)


class SimTimer(SimThread):
    """`threading.Timer`."""

    def __init__(self, world: World, interval: float, function: Callable[..., object], args: Any = ()) -> None:
        self._is_cancelled = False

        def run() -> None:
            world.sleep(interval)
            if not self._is_cancelled:
                function(*args)

        super().__init__(world, target=run)

    def cancel(self) -> None:
        """Do not call the function."""
        self._is_cancelled = True


class SimEvent:
    """`threading.Event`."""

    def __init__(self, world: World) -> None:
        self._world, self._is_set = world, False
        self._waiters: list[Ticket] = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Set it, and wake who waits."""
        self._is_set = True
        for ticket in self._waiters:
            self._world.wake(ticket)
        self._waiters = []

    def clear(self) -> None:
        """Unset it."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set."""
        if not self._is_set:
            self._waiters.append(self._world.make_ticket())
            self._world.wait(timeout)
        return self._is_set


class SimLock:
    """`threading.Lock`, and `threading.RLock`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Thread | None = None
        self.depth = 0
        self._waiters: deque[Ticket] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, which its owner may do again. Return whether it was taken."""
        until_s = None if timeout < 0 else self._world.now_s + timeout
        me = self._world.current
        while self.depth and (self._owner is not me):
            if not blocking or (until_s is not None and self._world.now_s >= until_s):
                return False
            self._waiters.append(self._world.make_ticket())
            self._world.wait(None if until_s is None else until_s - self._world.now_s)
        self._owner, self.depth = me, self.depth + 1
        return True

    def release(self) -> None:
        """Give it back."""
        self.depth -= 1
        if not self.depth:
            self._owner = None
            while self._waiters:
                self._world.wake(self._waiters.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition:
    """`threading.Condition`."""

    def __init__(self, world: World, lock: SimLock | None = None) -> None:
        self._world, self._lock = world, lock or SimLock(world)
        self._waiters: list[Ticket] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire(self, *args: Any) -> bool:
        """Take the lock."""
        return self._lock.acquire(*args)

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Give the lock back, wait, and take it again."""
        depth, self._lock.depth = self._lock.depth, 1
        self._waiters.append(self._world.make_ticket())
        self._lock.release()
        was_woken = self._world.wait(timeout)
        self._lock.acquire()
        self._lock.depth = depth
        return was_woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until a condition is true, or the time is over; return its value."""
        end_s = None if timeout is None else self._world.now_s + timeout
        while not (found := predicate()):
            left_s = None if end_s is None else end_s - self._world.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return found

    def notify_all(self) -> None:
        """Wake all that wait."""
        for ticket in self._waiters:
            self._world.wake(ticket)
        self._waiters = []

    notify = notify_all


class SimQueue:
    """`queue.SimpleQueue`, and `queue.Queue`."""

    def __init__(self, world: World, maxsize: int = 0) -> None:
        self._world = world
        self._items: deque[Any] = deque()
        self._waiters: deque[Ticket] = deque()

    def put(self, item: Any) -> None:
        """Add an item."""
        self._items.append(item)
        while self._waiters:
            self._world.wake(self._waiters.popleft())

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next item, and wait for one. Raises `queue.Empty`."""
        end_s = None if timeout is None else self._world.now_s + timeout
        while not self._items:
            if not block or (end_s is not None and self._world.now_s >= end_s):
                raise Empty
            self._waiters.append(self._world.make_ticket())
            self._world.wait(None if end_s is None else end_s - self._world.now_s)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """Return the next item. Raises `queue.Empty`."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Return whether there is none."""
        return not self._items

    def qsize(self) -> int:
        """Return how many there are."""
        return len(self._items)


class SimPool:
    """`ThreadPoolExecutor`, with one thread."""

    def __init__(self, world: World, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        self._world, self._queue = world, SimQueue(world)
        self._is_started, self._name = False, thread_name_prefix

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Call a function on the thread."""
        future: Future[Any] = Future()
        self._queue.put((future, function, args))
        if not self._is_started:
            self._is_started = True
            SimThread(self._world, target=self._run, name=self._name).start()
        return future

    def _run(self) -> None:
        while True:
            future, function, args = self._queue.get()
            self._world.yield_turn()
            if future is None:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except Exception as error:  # as an executor does
                    future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread."""
        self._queue.put((None, None, ()))
