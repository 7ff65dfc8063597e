"""The clients over the doubles: all but the servers is the clients' own."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from penstock.client.aio import AsyncClient
from penstock.client.sync import Client
from penstock.config.settings import RecordSettings
from penstock.messages import EndEvent, TokenEvent
from penstock.record.live import Deliver, LiveFeed, LiveThread, Mailbox
from penstock.record.log import AsyncTokenLog, RequestStatus, TokenLog
from penstock.redis.servers import Sharded
from penstock.testing.bus import MemoryBus
from penstock.testing.record import MemoryRecord, MemoryRecords

T = TypeVar("T")
SERVERS = ["memory"]


class _Log(TokenLog):
    """Reads the logs of records in memory."""

    def __init__(self, record: MemoryRecord) -> None:
        self._record = record

    def read_events(
        self, request_id: str, after_position: int = -1, limit: int | None = None
    ) -> list[TokenEvent | EndEvent]:
        return self._record.read_log(request_id, after_position)[:limit]

    def read_status(self, request_id: str) -> RequestStatus | None:
        return self._record.read_status(request_id)

    def is_remembered(self, request_id: str) -> bool:
        """Return whether the request has ended and its record has expired."""
        return self._record.is_remembered(request_id)

    def cancel_request(self, request_id: str) -> bool:
        return self._record.cancel_request(request_id)


class MemoryAsyncLog(AsyncTokenLog):
    """`AsyncTokenLog` over a record in memory, which `ask` asks."""

    def __init__(self, record: MemoryRecord) -> None:
        self._log = _Log(record)

    async def ask(self, question: Callable[..., T], *args: Any) -> T:
        """Return the answer to a question."""
        return question(*args)

    async def read_events(
        self, request_id: str, after_position: int = -1, limit: int | None = None
    ) -> list[TokenEvent | EndEvent]:
        """Return the events after the token at `after_position`, at most `limit`."""
        return await self.ask(self._log.read_events, request_id, after_position, limit)

    async def read_status(self, request_id: str) -> RequestStatus | None:
        """Return a request's record, or None where there is none."""
        return await self.ask(self._log.read_status, request_id)

    async def is_remembered(self, request_id: str) -> bool:
        """Return whether the request has ended and its record has expired."""
        return await self.ask(self._log.is_remembered, request_id)

    async def cancel_request(self, request_id: str) -> bool:
        """Cancel a request. Return False if it has ended already."""
        return await self.ask(self._log.cancel_request, request_id)


class _Live(LiveThread):
    """Passes events on while they are written, on the writer's thread."""

    def __init__(self, records: MemoryRecords) -> None:
        self._records = records

    @contextmanager
    def open_mailbox(self, channel: str) -> Iterator[Mailbox]:
        box = Mailbox()
        with self._records.listen(find_request_id(channel), box.put_event):
            box.put_event(None)
            yield box

    def close(self) -> None:
        pass


class MemoryFeed(LiveFeed):
    """`LiveFeed` over records in memory, for the event loop on which it was made."""

    def __init__(self, records: MemoryRecords) -> None:
        self._records, self.loop = records, asyncio.get_running_loop()
        self._listening: dict[tuple[str, Deliver], ExitStack] = {}

    def add_listener(self, channel: str, deliver: Deliver) -> None:
        """Call `deliver` for a channel's events from now on, and with None at first."""
        pass_on = partial(self.pass_on, channel, deliver)
        self._listening[channel, deliver] = stack = ExitStack()
        stack.enter_context(self._records.listen(find_request_id(channel), pass_on))
        pass_on(None)

    def pass_on(self, channel: str, deliver: Deliver, payload: bytes | None) -> None:
        """Let the loop deliver the events that were written. Any thread may call this."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.deliver, channel, deliver, payload)

    def deliver(self, channel: str, deliver: Deliver, payload: bytes | None) -> None:
        """Call `deliver`, if it still listens."""
        if (channel, deliver) in self._listening:
            deliver(payload)

    def remove_listener(self, channel: str, deliver: Deliver) -> None:
        """Stop calling `deliver`."""
        if (stack := self._listening.pop((channel, deliver), None)) is not None:
            stack.close()

    async def close(self) -> None:
        """Do nothing: there is no connection."""


def find_request_id(channel: str) -> str:
    """Return the request whose live channel this is, see `Pipeline.live_channel`."""
    return channel.partition("{")[2].rpartition("}")[0]


class MemoryClient(Client):
    """`Client` for a pipeline in memory. It does not tell the lag, which workers there do not measure."""

    def __init__(self, bus: MemoryBus, records: MemoryRecords) -> None:
        self._bus, self._records = bus, records
        super().__init__(pipeline=bus.pipeline.name)

    def _open_logs(self) -> None:
        super()._open_logs()
        self._publisher = self._bus.create_publisher()
        self._logs = Sharded(SERVERS, [_Log(MemoryRecord(self._records, RecordSettings()))])
        self._live = Sharded(SERVERS, [_Live(self._records)])

    def lag(self) -> NoReturn:
        """Raise `NotImplementedError`."""
        raise NotImplementedError("a pipeline in memory measures no lag")


class MemoryAsyncClient(AsyncClient):
    """`AsyncClient` for a pipeline in memory, as `MemoryClient`. It is made where an event loop runs."""

    def __init__(self, bus: MemoryBus, records: MemoryRecords) -> None:
        self._bus, self._records = bus, records
        super().__init__(pipeline=bus.pipeline.name)

    def _open_logs(self) -> None:
        super()._open_logs()
        self._publisher = self._bus.create_publisher()
        self._logs = Sharded(SERVERS, [MemoryAsyncLog(MemoryRecord(self._records, RecordSettings()))])
        self._live = Sharded(SERVERS, [MemoryFeed(self._records)])

    async def lag(self) -> NoReturn:
        """Raise `NotImplementedError`."""
        raise NotImplementedError("a pipeline in memory measures no lag")
