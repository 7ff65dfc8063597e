"""The ways to the servers, and clients of a Redis over a link, for threads and for asyncio."""

import asyncio
import contextlib
import random
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import fakeredis
import redis
import redis.asyncio

from penstock.names import WorkerKind
from sim.world.network import Link, make_bus_error, make_redis_error
from sim.world.runtime import EPOCH_S, Process, World

JUDGE = "judge"
"""Who asks the servers from outside of the world."""


class KeyServer:
    """The server. It has a clock of its own, whoever asks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.client: Any = fakeredis.FakeRedis(server=fakeredis.FakeServer())
        """Asks it at once, without a link."""

    @contextlib.contextmanager
    def install_clock(self) -> Iterator[None]:
        """Let the modules of fakeredis read the world's time."""
        clock = types.SimpleNamespace(time=lambda: EPOCH_S + self._world.now_s)
        modules = [one for name, one in sys.modules.items() if name.startswith("fakeredis.")]
        changed = [one for one in modules if vars(one).get("time") is time]
        for module in changed:
            vars(module)["time"] = clock
        try:
            yield
        finally:
            for module in changed:
                vars(module)["time"] = time

    def run_pipeline(self, commands: list[Any], transaction: bool, raise_on_error: bool) -> list[Any]:
        """Return the replies to commands, each with its options."""
        pipe = self.client.pipeline(transaction=transaction)
        for words, options in commands:
            pipe.execute_command(*words, **options)
        replies: list[Any] = pipe.execute(raise_on_error)
        return replies


class LinkedClient(redis.Redis):
    """`redis.Redis` over a link."""

    def __init__(self, server: KeyServer, link: Link) -> None:
        super().__init__()
        self.server, self.link = server, link

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Return the reply to a command."""
        return self.link.call(lambda: self.server.client.execute_command(*args, **options), may_be_late=True)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> "redis.client.Pipeline":
        """Return a pipeline."""
        return _LinkedPipeline(self, transaction)

    def close(self) -> None:
        """Do nothing: there is no connection."""


class _LinkedPipeline(redis.client.Pipeline):
    def __init__(self, client: LinkedClient, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client, self._is_transaction = client, transaction

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Return the replies to all commands."""
        commands, self.command_stack = self.command_stack, []
        server = self._client.server
        run = lambda: server.run_pipeline(commands, self._is_transaction, raise_on_error)  # noqa: E731
        return list(self._client.link.call(run, may_be_late=True))


class AsyncLinkedClient(redis.asyncio.Redis):
    """`redis.asyncio.Redis` over a link. Each call waits on a thread of its own."""

    def __init__(self, server: KeyServer, link: Link) -> None:
        super().__init__()
        self.server, self.link = server, link

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Return the reply to a command."""
        run = lambda: self.server.client.execute_command(*args, **options)  # noqa: E731
        return await asyncio.to_thread(self.link.call, run, may_be_late=True)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> "redis.asyncio.client.Pipeline":
        """Return a pipeline."""
        return _AsyncLinkedPipeline(self, transaction)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Do nothing: there is no connection."""


class _AsyncLinkedPipeline(redis.asyncio.client.Pipeline):
    def __init__(self, client: AsyncLinkedClient, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Return the replies to all commands."""
        commands, self.command_stack = self.command_stack, []
        server = self._client.server
        run = lambda: server.run_pipeline(commands, self.is_transaction, raise_on_error)  # noqa: E731
        return list(await asyncio.to_thread(self._client.link.call, run, may_be_late=True))


@dataclass(eq=False)
class Place:
    """A process's name, and the process that has it now."""

    name: str
    start: "Callable[[Place], None]"
    """Starts a process in it."""
    stage: WorkerKind | None = None
    """What kind of worker it is."""
    process: Process | None = None
    stop: Callable[[], None] = lambda: None
    """Tells the process to leave."""
    cuts: dict[str, float] = field(default_factory=dict)
    """Until when the way to a server is cut."""


class Ways:
    """The ways from processes and clients to the servers, and what is wrong with them now."""

    def __init__(self, world: World, chance: random.Random, loss: float, delay_s: float) -> None:
        self._world, self._chance, self._loss, self._delay_s = world, chance, loss, delay_s
        self.places: list[Place] = []
        """The processes."""
        self.is_calm = False
        """Whether there are no mishaps any more."""
        self.pass_point: Callable[[], object] = lambda: None
        """Called before and after each call of a process."""
        self.full_until_s = 0.0
        """Until when Redis takes no command that may need memory, and Kafka no messages."""
        self.pauses = {"redis": 0.0, "bus": 0.0}
        """Until when a server stands still."""

    def find_link(self, who: str, server: str) -> Link | None:
        """Return the way of a process or client, by its name, to a server; None for the judge, who asks from outside.

        Clients reach Redis always.
        """
        if who == JUDGE:
            return None
        place = next((place for place in self.places if place.name == who), None)
        loss = 0.0 if self.is_calm or (place is None and server == "redis") else self._loss
        make_error = make_redis_error if server == "redis" else make_bus_error
        chance = random.Random(self._chance.random())
        if place is None:
            return Link(self._world, chance, make_error, loss, self._delay_s)
        return Link(
            self._world,
            chance,
            make_error,
            loss,
            self._delay_s,
            lambda: not self.is_calm and place.cuts.get(server, 0.0) > self._world.now_s,
            lambda: self.pauses[server],
            self.pass_point,
            lambda: server == "redis" and self._world.now_s < self.full_until_s,
        )
