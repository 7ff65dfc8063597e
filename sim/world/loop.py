"""An event loop of the world: a thread of the world runs it, and its time is the world's."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from sim.world.runtime import SimThread, Ticket, World


class WorldLoop(asyncio.BaseEventLoop):
    """An event loop. It waits as a thread of the world does, and reads no sockets."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._selector = self  # which `BaseEventLoop` asks for what has happened
        self._ticket: Ticket | None = None

    def time(self) -> float:
        """Return the world's time."""
        return self._world.now_s

    def select(self, timeout: float | None) -> list[Any]:
        """Wait until something is called from another thread, or the time is over; return no events."""
        if timeout is None or timeout > 0:
            self._ticket = self._world.make_ticket()
            self._world.wait(timeout)
            self._ticket = None
        return []

    def run_forever(self) -> None:
        """Run on the world's current thread until it is stopped."""
        thread = self._world.current
        assert thread is not None, "only a thread of the world can run it"
        thread.loop = self
        try:
            super().run_forever()
        finally:
            thread.loop = None

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """Call a function on a thread: on a new one where no executor is named."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        made: Future[Any] = Future()
        made.set_running_or_notify_cancel()

        def run() -> None:
            try:
                made.set_result(func(*args))
            except Exception as error:  # as an executor does
                made.set_exception(error)

        SimThread(self._world, target=run, name="to_thread").start()
        return asyncio.wrap_future(made, loop=self)

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no events."""

    def _write_to_self(self) -> None:
        """End the wait: any thread may call this."""
        if self._ticket is not None:
            self._world.wake(self._ticket)
