"""The guard without a socket: whom an open gateway answers."""

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from penstock.config.settings import GatewayProcessSettings, GuardSettings, load_group
from penstock.ingest.gateway.guard import GuardMiddleware
from penstock.ingest.gateway.server import _Server


async def ask(host: str, *, only_local: bool, origin: str | None = None) -> httpx.Response:
    app = Starlette(routes=[Route("/x", lambda _: PlainTextResponse("fine"))])
    guard = GuardMiddleware(app, GuardSettings(), only_local=only_local)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guard)) as client:
        return await client.get(
            "http://gateway/x", headers={"host": host} | ({} if origin is None else {"origin": origin})
        )


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:8080", "127.0.0.1", "[::1]:8080", "[::1]"])
async def test_an_open_gateway_answers_to_this_machines_names(host: str) -> None:
    assert (await ask(host, only_local=True)).text == "fine"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "10.0.0.1:8080", "[::2]:8080", "localhost.evil:1"]
)
async def test_and_to_no_others(host: str) -> None:
    refused = await ask(host, only_local=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
    assert (await ask(host, only_local=False)).text == "fine"


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://localhost:3000", 200), ("http://[::1]", 200), ("https://evil.example", 403), ("null", 403), ("", 403)],
)
async def test_pages_of_other_sites_are_refused(origin: str, status: int) -> None:
    assert (await ask("localhost:8080", only_local=True, origin=origin)).status_code == status


def test_the_client_closes_an_idle_connection_before_the_gateway_does() -> None:
    """Otherwise a request that is sent as the gateway closes is reset. OpenAI's client keeps them as httpx does."""
    kept_s = httpx.Limits().keepalive_expiry
    assert kept_s is not None
    assert _Server(FastAPI(), load_group(GatewayProcessSettings)).config.timeout_keep_alive > 2 * kept_s
