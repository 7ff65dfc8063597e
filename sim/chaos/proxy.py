"""A TCP proxy on this machine that can cut, hang, slow down and refuse connections."""

import asyncio
import contextlib
import ssl
import threading
from typing import Self

from penstock.local.processes import find_free_port

CHUNK_BYTES = 2**16
MAX_DELAYED_CHUNKS = 4096


class Proxy:
    """Forwards a port to another one on its own thread. Its public methods may be called from any thread."""

    def __init__(self, target_port: int, port: int | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.port, self.target_port = port or find_free_port(), target_port
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._tls = tls
        self._delay_s, self._request_delay_s, self._reply_delay_s, self._refuses = 0.0, 0.0, 0.0, False
        self._num_bytes_left: int | None = None
        self.num_connections = 0
        """How many connections there were."""
        self.num_reply_bytes = 0
        """How many bytes of replies were read."""
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name=f"proxy-{self.port}", daemon=True)

    # From any thread.

    def cut_connections(self) -> None:
        """Abort all connections. New ones are accepted."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def stop_forwarding(self) -> None:
        """Stop forwarding. Connections stay open, and new ones are accepted."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def delay_forwarding(self, delay_s: float) -> None:
        """Delay each forwarded chunk by `delay_s`."""
        self._delay_s = delay_s

    def delay_replies(self, delay_s: float) -> None:
        """Hand each reply on `delay_s` later, in order and without holding up the next one, as a slow server does.

        `forward_normally` does not undo it.
        """
        self._reply_delay_s = delay_s

    def delay_both_ways(self, delay_s: float) -> None:
        """Hand all on `delay_s` later, either way, as a long way does. `forward_normally` does not undo it."""
        self._request_delay_s = self._reply_delay_s = delay_s

    def refuse_connections(self) -> None:
        """Abort all connections, and new ones as they come."""
        self._refuses = True
        self.cut_connections()

    def cut_after(self, num_bytes: int) -> None:
        """End the connection on which replies go beyond so many bytes: none, and the next reply is lost."""
        self._num_bytes_left = num_bytes

    def forward_normally(self) -> None:
        """Undo all faults; what was held back is forwarded."""
        self._delay_s, self._refuses = 0.0, False
        self._loop.call_soon_threadsafe(self._flows.set)

    # On the loop.

    def _abort_all(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the proxy ends, and asyncio would tell of it
                await self._connect_through(reader, writer)
        finally:
            self._open.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _connect_through(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            return
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            self.num_connections += 1
            self._open.add(far_writer)
            try:
                requests, replies = (asyncio.Queue[tuple[float, bytes]](MAX_DELAYED_CHUNKS) for _ in range(2))
                ways = [
                    self._read_chunks(reader, requests, is_reply=False),
                    self._forward_chunks(requests, far_writer, is_reply=False),
                    self._read_chunks(far_reader, replies, is_reply=True),
                    self._forward_chunks(replies, writer, is_reply=True),
                ]
                pumps = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                self._open.discard(far_writer)
                far_writer.transport.abort()

    async def _read_chunks(
        self, reader: asyncio.StreamReader, chunks: "asyncio.Queue[tuple[float, bytes]]", *, is_reply: bool
    ) -> None:
        """Put each chunk of one side, and an empty one at its end, into a queue with the time when it is due."""
        chunk = b"first"
        while chunk:
            chunk = await reader.read(CHUNK_BYTES)
            self.num_reply_bytes += len(chunk) * is_reply
            delay_s = self._reply_delay_s if is_reply else self._request_delay_s
            await chunks.put((self._loop.time() + delay_s, chunk))
        await asyncio.Event().wait()  # `_forward_chunks` ends the connection

    async def _forward_chunks(
        self, chunks: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        while True:
            due_s, chunk = await chunks.get()
            if due_s > self._loop.time():
                await asyncio.sleep(due_s - self._loop.time())
            if not chunk:
                return
            await self._hold_back()
            is_last, left = False, self._num_bytes_left if is_reply else None
            if left is not None:
                is_last, chunk = len(chunk) >= left, chunk[:left]
                self._num_bytes_left = None if is_last else left - len(chunk)
            writer.write(chunk)
            await writer.drain()
            if is_last:
                writer.close()
                await writer.wait_closed()  # what was written arrives
                return

    async def _hold_back(self) -> None:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        await self._flows.wait()

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            server = runner.run(self._start_listening())
            self._started.set()
            self._loop.run_forever()
            server.close()
            runner.run(self._cancel_tasks())

    async def _start_listening(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve_connection, "127.0.0.1", self.port, ssl=self._tls)

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
