import asyncio

from penstock.ingest.gateway.protocol import MAX_JOINED_BYTES, JoiningTransport


class KeptTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closed
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


async def test_what_is_written_in_one_turn_goes_out_together_and_in_order() -> None:
    kept = KeptTransport()
    joining = JoiningTransport(kept, asyncio.get_running_loop())
    joining.write(b"a")
    joining.write(bytearray(b"b"))
    assert kept.written == []
    await asyncio.sleep(0)
    joining.write(b"c")
    await asyncio.sleep(0)
    assert kept.written == [b"ab", b"c"]


async def test_a_turn_holds_back_little() -> None:
    kept = KeptTransport()
    joining = JoiningTransport(kept, asyncio.get_running_loop())
    joining.write(b"a")
    joining.write(bytes(MAX_JOINED_BYTES))
    assert len(kept.written) == 1
    joining.write(b"b")
    await asyncio.sleep(0)
    assert kept.written[1:] == [b"b"]


async def test_a_connection_is_closed_behind_what_was_written_and_aborted_without_it() -> None:
    closed, aborted = KeptTransport(), KeptTransport()
    for kept in (closed, aborted):
        joining = JoiningTransport(kept, asyncio.get_running_loop())
        joining.write(b"a")
        joining.close() if kept is closed else joining.abort()
        await asyncio.sleep(0)
    assert closed.written == [b"a"]
    assert aborted.written == []
