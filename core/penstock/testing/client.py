"""The clients over the doubles: all but the servers is the clients' own."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

from penstock.client.aio import AsyncClient
from penstock.client.sync import Client
from penstock.config.settings import RecordSettings
from penstock.messages import EndEvent, TokenEvent
from penstock.record.live import Deliver, LiveFeed, LiveThread, Mailbox
from penstock.record.log import AsyncTokenLog, RequestStatus, TokenLog
from penstock.redis.servers import Sharded
from penstock.testing.bus import MemoryBus
from penstock.testing.record import MemoryRecord, MemoryRecords

SERVERS = ["memory"]


class _Log(TokenLog):
    """Reads the logs of records in memory."""

    def __init__(self, records: MemoryRecords) -> None:
        self._record = MemoryRecord(records, RecordSettings())

    def read_events(
        self, request_id: str, after_position: int = -1, limit: int | None = None
    ) -> list[TokenEvent | EndEvent]:
        return self._record.read_log(request_id, after_position)[:limit]

    def read_status(self, request_id: str) -> RequestStatus | None:
        return self._record.read_status(request_id)

    def cancel_request(self, request_id: str) -> bool:
        return self._record.cancel_request(request_id)


class _AsyncLog(AsyncTokenLog):
    """`_Log` for asyncio."""

    def __init__(self, records: MemoryRecords) -> None:
        self._log = _Log(records)

    async def read_events(
        self, request_id: str, after_position: int = -1, limit: int | None = None
    ) -> list[TokenEvent | EndEvent]:
        return self._log.read_events(request_id, after_position, limit)

    async def read_status(self, request_id: str) -> RequestStatus | None:
        return self._log.read_status(request_id)

    async def cancel_request(self, request_id: str) -> bool:
        return self._log.cancel_request(request_id)


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


class _AsyncLive(LiveFeed):
    """`_Live` for the event loop on which it was made."""

    def __init__(self, records: MemoryRecords) -> None:
        self._records, self._loop = records, asyncio.get_running_loop()
        self._listening: dict[tuple[str, Deliver], ExitStack] = {}

    def add_listener(self, channel: str, deliver: Deliver) -> None:
        def pass_on(payload: bytes) -> None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(deliver, payload)

        self._listening[channel, deliver] = stack = ExitStack()
        stack.enter_context(self._records.listen(find_request_id(channel), pass_on))
        deliver(None)

    def remove_listener(self, channel: str, deliver: Deliver) -> None:
        self._listening.pop((channel, deliver)).close()

    async def close(self) -> None:
        pass


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
        self._logs = Sharded(SERVERS, [_Log(self._records)])
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
        self._logs = Sharded(SERVERS, [_AsyncLog(self._records)])
        self._live = Sharded(SERVERS, [_AsyncLive(self._records)])

    async def lag(self) -> NoReturn:
        """Raise `NotImplementedError`."""
        raise NotImplementedError("a pipeline in memory measures no lag")
