"""Gateways of two regions: the real applications with their layer of regions, which ask each other over virtual HTTP.

`httpx2` is the product's own up to its transport. A request takes its time from region to region; where the way is cut
no connection comes about, and answers under way stand still, until the way is back or the connection is given up.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2

from penstock.config.settings import GatewayProcessSettings, RegionSettings, load_group
from penstock.ingest.keys import KEYS_OPEN
from penstock.record.live import Deliver, LiveFeed
from penstock.redis.client import async_redis_client, redis_client
from sim.world.gateways import Connection, Gateways
from sim.world.redis_server import AsyncClient
from sim.world.regions.servers import HOME, PEER, REGIONS, RegionServers, RegionWays, find_region
from sim.world.runtime import Process
from sim.world.ways import Place

SECRET = "the gateways' own secret"
GIVEN_UP_S = 20.0
"""How long a connection lasts on which nothing comes through."""
ANSWER_S = 600.0
BEGIN_AGAIN_S = 1.0


def make_settings(region: str) -> RegionSettings:
    """Return the settings of a region's processes."""
    (other,) = {*REGIONS} - {region}
    copies = HOME if region == PEER else ""
    return RegionSettings(name=region, peers=f"{other}=http://{other}-gateways:8080", secret=SECRET, copies=copies)


class BrokenFeed(LiveFeed):
    """`LiveFeed` whose connection is lost again and again: nothing comes but that a subscription begins anew."""

    def __init__(self, url: str) -> None:
        self._given = dict[tuple[str, Deliver], None]()
        self._task = asyncio.create_task(self._begin_forever())

    def add_listener(self, channel: str, deliver: Deliver) -> None:
        """Call `deliver` each time that its subscription begins."""
        self._given[channel, deliver] = None
        asyncio.get_running_loop().call_soon(deliver, None)

    def remove_listener(self, channel: str, deliver: Deliver) -> None:
        """Stop calling `deliver`."""
        self._given.pop((channel, deliver), None)

    async def close(self) -> None:
        """Stop."""
        self._task.cancel()

    async def _begin_forever(self) -> None:
        while True:
            await asyncio.sleep(BEGIN_AGAIN_S)
            for _, deliver in list(self._given):
                deliver(None)


@dataclass(eq=False)
class PeerAnswer(httpx2.AsyncByteStream):
    """The answer of another region's gateway, as it comes."""

    gateways: "RegionGateways"
    caller: str
    """The region that asked."""
    region: str
    connection: Connection | None = None
    has_left: bool = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        while True:
            message = await asyncio.to_thread(self.read_message, ANSWER_S)
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return

    def read_message(self, limit_s: float) -> dict[str, Any]:
        """Return the next message. Raise `httpx2.TransportError` where the connection is lost, or silent for long."""
        world = self.gateways.world
        assert self.connection is not None, "it was connected"
        message = self.connection.read_message(limit_s)
        if message is None:
            raise httpx2.RemoteProtocolError("the connection was lost")
        self.gateways.pass_way()
        end_s = world.now_s + min(limit_s, GIVEN_UP_S)
        while self.gateways.ways.is_cut(self.caller, self.region):
            if world.now_s > end_s:
                raise httpx2.ReadTimeout("nothing comes through")
            world.sleep(0.1)
        return message

    async def aclose(self) -> None:
        """Leave."""
        self.leave()

    def leave(self) -> None:
        """Close the connection from the caller's side."""
        self.has_left = True
        if self.connection is not None:
            self.connection.leave()


class PeerTransport(httpx2.AsyncBaseTransport):
    """Sends requests of one gateway to those of other regions."""

    def __init__(self, gateways: "RegionGateways", process: Process) -> None:
        self._gateways, self._process = gateways, process

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer when it begins."""
        await request.aread()
        answer = self._gateways.open_answer(self._process, request.url.host)
        try:
            status, headers = await asyncio.to_thread(self._gateways.ask_peer, answer, request)
        except BaseException:
            answer.leave()
            raise
        return httpx2.Response(status, headers=headers, stream=answer)


@dataclass(eq=False)
class RegionGateways(Gateways):
    """The gateways of both regions."""

    servers: RegionServers
    ways: RegionWays
    note_failure: Callable[[Process, BaseException], None]
    on_left: Callable[[Place], None]
    asked: dict[Process, list[PeerAnswer]] = field(default_factory=dict)
    """By process of a gateway: what it asked others."""

    def __post_init__(self) -> None:
        super().__init__(self.servers, self.note_failure, self.on_left)
        self.world = self.servers.world

    def add_place(self, name: str) -> Place:
        """Return a place for a gateway."""
        self.places.append(made := Place(name, self._start))
        return made

    def load_settings(self, place: Place) -> GatewayProcessSettings:
        """Return the settings of a gateway."""
        region = make_settings(find_region(place.name))
        return load_group(GatewayProcessSettings, admission={"keys": KEYS_OPEN})._replace(region=region)

    def list_doubles(self) -> list[tuple[object, object]]:
        """Return what a process connects with, each with the double that leads to its region's servers, or peers."""
        http = SimpleNamespace(**vars(httpx2) | {"AsyncClient": self._open_client, "get": self._get})
        return [
            (async_redis_client, lambda url: AsyncClient(redis_client(url))),
            (LiveFeed, BrokenFeed),
            (httpx2, http),
        ]

    def note_killed(self, place: Place) -> None:
        """Break the connections of a gateway whose process was killed, from both sides."""
        super().note_killed(place)
        for answer in self.asked.pop(place.process, ()) if place.process is not None else ():
            answer.leave()

    def pass_way(self) -> None:
        """Wait as long as something takes from one region to the other."""
        self.world.sleep(self.ways.between_s)

    def open_answer(self, process: Process, host: str) -> PeerAnswer:
        """Return the answer that a process will have from the gateways of a host."""
        answer = PeerAnswer(self, find_region(process.name), find_region(host))
        self.asked.setdefault(process, []).append(answer)
        return answer

    def ask_peer(self, answer: PeerAnswer, request: httpx2.Request) -> tuple[int, Mapping[str, str]]:
        """Send a request to a gateway of a region, and return status and headers. Raise `httpx2.TransportError`."""
        limits = request.extensions.get("timeout", {})
        place = self._connect_region(answer, limits.get("connect") or GIVEN_UP_S)
        path, _, query = request.url.raw_path.partition(b"?")
        headers = {name.decode().lower(): value.decode() for name, value in request.headers.raw}
        if answer.has_left:
            raise httpx2.ReadError("nobody waits for it")
        answer.connection = self.connect(place, request.method, path.decode(), headers, request.content, query)
        if answer.connection is None:
            raise httpx2.ConnectError("the connection is refused")
        start = answer.read_message(limits.get("read") or ANSWER_S)
        return start["status"], start["headers"]

    def _connect_region(self, answer: PeerAnswer, limit_s: float) -> Place:
        """Return the place of one of the region's gateways. Raise `httpx2.TransportError`."""
        self.pass_way()
        if self.ways.is_cut(answer.caller, answer.region):
            self.world.sleep(limit_s)
            raise httpx2.ConnectTimeout("no connection comes about")
        self.pass_way()
        found = [place for place in self.places if find_region(place.name) == answer.region and place in self.running]
        if not found:
            raise httpx2.ConnectError("the connection is refused")
        self.pass_way()
        return found[self.world.num_turns % len(found)]

    def _open_client(self, *, timeout: float, **_: Any) -> httpx2.AsyncClient:
        assert self.world.current is not None, "only a process of the world has one"
        transport = PeerTransport(self, self.world.current.process)
        return httpx2.AsyncClient(transport=transport, timeout=timeout, trust_env=False)

    def _get(self, url: str, headers: Mapping[str, str], timeout: float) -> httpx2.Response:
        """Do as `httpx2.get`."""
        assert self.world.current is not None, "only a process of the world asks"
        limits = {"connect": timeout, "read": timeout, "write": timeout, "pool": timeout}
        answer = self.open_answer(self.world.current.process, str(urlsplit(url).hostname))
        status, told = self.ask_peer(
            answer, httpx2.Request("GET", url, headers=headers, extensions={"timeout": limits})
        )
        body, more = b"", True
        while more:
            message = answer.read_message(timeout)
            body, more = body + message.get("body", b""), message.get("more_body", False)
        return httpx2.Response(status, headers=told, content=body)
