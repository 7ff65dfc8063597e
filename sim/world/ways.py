"""The ways from processes and clients to the servers."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.names import WorkerKind
from sim.world.network import Link, make_bus_error, make_redis_error
from sim.world.runtime import Process, World

PRODUCERS = ("producer-0", "producer-1")
"""Who sends the clients' requests, each with what it knows of the workers."""
JUDGE = "judge"
"""What the names end with of who asks the servers from outside of the world."""


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

        Clients reach Redis always; where producers do not, they know no heartbeats.
        """
        if who.endswith(JUDGE):
            return None
        place = next((place for place in self.places if place.name == who), None)
        is_beat = who in PRODUCERS and server == "redis"
        loss = 0.0 if self.is_calm or (place is None and server == "redis" and not is_beat) else self._loss
        make_error = make_redis_error if server == "redis" else make_bus_error
        chance = random.Random(self._chance.random())
        if place is None and not is_beat:
            return Link(self._world, chance, make_error, loss, self._delay_s)
        return Link(
            self._world,
            chance,
            make_error,
            loss,
            self._delay_s,
            lambda: not self.is_calm and place is not None and place.cuts.get(server, 0.0) > self._world.now_s,
            lambda: self.pauses[server],
            self.pass_point if place is not None else lambda: None,
            lambda: server == "redis" and self._world.now_s < self.full_until_s,
        )
