"""The proxy does to connections what it is told to."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from penstock.waiting import wait_until
from sim.chaos.proxy import Proxy


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """Before a server that says back what it is told."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo_forever, args=(server,), daemon=True).start()
        with Proxy(server.getsockname()[1]) as made:
            yield made
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)


def echo_forever(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection = server.accept()[0]
            threading.Thread(target=echo, args=(connection,), daemon=True).start()


def echo(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        while piece := connection.recv(4096):
            connection.sendall(piece)


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), 10.0)


def says_back(connection: socket.socket) -> bool:
    connection.sendall(b"hello")
    return connection.recv(16) == b"hello"


def is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(16) == b""
    except ConnectionError:
        return True


def test_what_is_cut_ends_and_a_new_connection_serves(proxy: Proxy) -> None:
    with connect(proxy) as first, connect(proxy) as second:
        assert says_back(first)
        assert says_back(second)
        proxy.cut_connections()
        assert is_over(first)
        assert is_over(second)
    with connect(proxy) as third:
        assert says_back(third)


def test_what_hangs_goes_on_when_it_is_healed(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        assert says_back(connection)
        proxy.stop_forwarding()
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            says_back(connection)
        proxy.forward_normally()
        connection.settimeout(10.0)
        assert connection.recv(16) == b"hello"


def test_who_is_refused_is_welcome_again_afterwards(proxy: Proxy) -> None:
    proxy.refuse_connections()
    with connect(proxy) as connection:
        assert is_over(connection)
    proxy.forward_normally()

    def serves() -> bool:
        with connect(proxy) as connection:
            return says_back(connection)

    wait_until(serves, 10, "the proxy serves again")
