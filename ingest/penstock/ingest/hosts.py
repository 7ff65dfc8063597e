"""The addresses of hosts that callers name, and whether they are of the public internet."""

import asyncio
import socket
from concurrent.futures import Executor
from ipaddress import IPv6Address, IPv6Network, ip_address

LOOKUP_S = 5.0
"""How long a host's addresses may take to be found."""
_INWARDS = [*map(IPv6Network, ("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "fec0::/10", "2001::/32", "2002::/16"))]
"""Networks that Python finds global, whose addresses may lead to those of version 4 within, or to a site's own."""


async def find_host_addresses(host: str, executor: Executor | None = None) -> list[str]:
    """Return the addresses of a host, each once. Raises `OSError` where none is found, `ValueError` for no name."""
    lookup = asyncio.get_running_loop().run_in_executor(executor, _look_up, host)
    try:
        async with asyncio.timeout(LOOKUP_S):
            return await lookup
    except TimeoutError:
        raise OSError(f"no address of {host} for {LOOKUP_S:g} seconds") from None
    except UnicodeError:
        raise ValueError(f"{host} cannot be the name of a host") from None


def is_public_address(text: str) -> bool:
    """Return whether an address is one of the public internet."""
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        if any(address in network for network in _INWARDS):
            return False
        address = address.ipv4_mapped or address
    return address.is_global and not address.is_multicast


def _look_up(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"{host} has no address: {error.strerror}") from None
    return list(dict.fromkeys(str(place[4][0]) for place in found))
