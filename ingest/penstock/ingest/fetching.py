"""Pictures that a request names by an address: fetched by https, from hosts that the operator allows, and from nowhere
that only this machine reaches.

    1  check    https, a host of `PENSTOCK_GATEWAY_IMAGE_HOSTS`, no user in the address
    2  resolve  once; if one of the addresses is not public, none is asked
    3  dial     one of these addresses, under the name in TLS and in `Host`: the name is not looked up again
    4  read     as many bytes as are allowed, uncompressed; a redirect begins again at 1, and keeps the port
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import httpx2

from penstock.config.settings import GatewaySettings
from penstock.ingest.hosts import find_host_addresses, is_public_address

FETCH_S = 10.0
"""How long a picture may take with all its redirects."""
MAX_REDIRECTS = 3
MAX_LOOKUPS = 8
"""The most names that are looked up at once."""
_REDIRECTS = (301, 302, 303, 307, 308)
_DEFAULT_PORT = 443


class PictureFetcher:
    """Fetches pictures for one gateway process."""

    def __init__(
        self, settings: GatewaySettings, find_addresses: Callable[[str], Awaitable[list[str]]] | None = None
    ) -> None:
        self._settings = settings
        # Threads of their own: a name server that hangs holds up nothing else. There are none until one is needed.
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS, "pictures")
        self._find_addresses = find_addresses or partial(find_host_addresses, executor=self._lookups)

    def close(self) -> None:
        """Wait for no look-up any more."""
        self._lookups.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """The certificates by which hosts are known: made when needed, as reading them takes 50 ms."""
        return ssl.create_default_context()

    async def fetch_picture(self, text: str, max_bytes: int) -> bytes:
        """Return the file at an address. Raises `ValueError`, whose message is for the caller."""
        try:
            async with asyncio.timeout(FETCH_S):
                url = self._check_url(text)
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._ask(url, max_bytes)
                    if isinstance(found, bytes):
                        return found
                    target = self._check_url(str(url.join(found)))
                    if _find_port(target) != _find_port(url):
                        raise ValueError(f"{url.host} redirects to another port")
                    url = target
        except TimeoutError:
            raise ValueError(f"the file was not there within {FETCH_S:g} seconds") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise ValueError(f"the file cannot be fetched ({type(error).__name__})") from None
        raise ValueError(f"there are more than {MAX_REDIRECTS} redirects")

    def _check_url(self, text: str) -> httpx2.URL:
        """Step 1."""
        url = httpx2.URL(text)
        if url.scheme != "https" or not url.host:
            raise ValueError("the address does not begin with https:// and a host, nor with data:")
        if url.userinfo:
            raise ValueError("the address has a user or a password in it")
        port = _find_port(url)
        host = url.raw_host.decode().lower()
        if not self._settings.allows_image_host(host, port):
            place = host[:256] + (f":{port}" if port != _DEFAULT_PORT else "")
            raise ValueError(f"this server fetches nothing from {place}: send the file itself, as a data URL")
        return url

    async def _ask(self, url: httpx2.URL, max_bytes: int) -> bytes | str:
        """Do steps 2 to 4; return the file, or where it is instead."""
        addresses = await self._find_addresses(url.raw_host.decode().strip("[]"))
        if not addresses or not all(map(is_public_address, addresses)):
            raise ValueError(f"{url.host} has an address that is not public")
        headers = {
            "host": url.netloc.decode(),
            "accept": "image/*",
            "accept-encoding": "identity",
            "user-agent": "penstock",
        }
        # Not kept: a connection to an address would be used for another name with this address. Not by a proxy of the
        # environment, which would look the name up again.
        async with httpx2.AsyncClient(verify=self.tls, trust_env=False, timeout=FETCH_S) as client:
            for number, address in enumerate(addresses, start=1):
                target, extensions = url.copy_with(host=address), {"sni_hostname": url.raw_host.decode()}
                try:
                    async with client.stream("GET", target, headers=headers, extensions=extensions) as answer:
                        return await _read_answer(answer, max_bytes)
                except httpx2.ConnectError:
                    if number == len(addresses):
                        raise
        raise AssertionError("there is an address")


async def _read_answer(answer: httpx2.Response, max_bytes: int) -> bytes | str:
    if answer.status_code in _REDIRECTS:
        return answer.headers.get("location", "")
    if answer.status_code != 200:
        raise ValueError(f"the host answers with status {answer.status_code}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise ValueError("the host sends the file compressed")
    data = bytearray()
    async for chunk in answer.aiter_raw():
        data += chunk
        if len(data) > max_bytes:
            raise ValueError(f"the file has more than {max_bytes:,} bytes")
    return bytes(data)


def _find_port(url: httpx2.URL) -> int:
    return url.port or _DEFAULT_PORT
