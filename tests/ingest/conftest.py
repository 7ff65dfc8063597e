"""A pipeline of worker processes with a gateway and the official SDK in front of it, and one without workers."""

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import httpx
import openai
import pytest
import pytest_asyncio
import redis.asyncio
from fastapi import FastAPI, Request

from penstock.config.addresses import Addresses
from penstock.config.settings import GatewayProcessSettings, load_group
from penstock.ingest import webhooks
from penstock.ingest.gateway import kept_responses
from penstock.ingest.gateway.app import create_app
from penstock.ingest.gateway.state import find_caller
from penstock.ingest.tenants import Caller
from penstock.local.stack import Stack
from penstock.names import Pipeline
from penstock.redis.client import async_redis_client
from sim.workload import TOOL_MODEL
from tests.gateways import ScriptedPipeline, open_stack


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and two decode workers, and a gateway."""
    with open_stack(tmp_path_factory.mktemp("line"), pipeline="ingest", decode=2) as stack:
        yield stack


@pytest.fixture(scope="module")
def tool_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker of the model that calls tools, and a gateway."""
    with open_stack(tmp_path_factory.mktemp("tools"), TOOL_MODEL, pipeline="tools") as stack:
        yield stack


@pytest.fixture
def base_url(line: Stack) -> str:
    """Where the gateway answers."""
    return line.gateway_url


@pytest.fixture
def sdk(base_url: str) -> Iterator[openai.OpenAI]:
    """The official client, as it comes but for its retries."""
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=None) as client:
        yield client


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator["redis.asyncio.Redis"]:
    """A connection to the shared Redis, as a gateway has it."""
    async with async_redis_client(redis_url) as made:
        yield made


@pytest.fixture
def own_marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Webhooks of this test know of no gateways of other tests, which share its Redis, and these not of them."""
    keys = [f"penstock:webhooks-{uuid.uuid4().hex}-{number}" for number in range(2)]
    monkeypatch.setattr(webhooks, "WEBHOOK_MARK_KEYS", keys)
    return keys


def call_as_tenant(request: Request) -> Caller:
    """Return the caller of a gateway that believes a header."""
    return Caller(tenant=request.headers.get("x-tenant", "default"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[FastAPI]]:
    """The applications of two gateways on the loop of this module's tests, with one store, before all pipelines.

    They look for nothing by themselves while the tests run.
    """
    settings = load_group(GatewayProcessSettings, batch={"store": str(tmp_path_factory.mktemp("store"))})
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(kept_responses, "RENEW_INTERVAL_S", 3600.0)
        apps = [create_app(settings, Addresses(stream_url=redis_url)) for _ in range(2)]
        for app in apps:
            app.dependency_overrides[find_caller] = call_as_tenant
            await app.state.gateway.open()
            stack.push_async_callback(app.state.gateway.close)
        yield apps


@pytest.fixture
async def bare() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that has connected with nothing."""
    transport = httpx.ASGITransport(create_app(load_group(GatewayProcessSettings), Addresses()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def scripted(redis_url: str, pipeline: Pipeline) -> Iterator[ScriptedPipeline]:
    """A pipeline whose workers the test plays."""
    with ScriptedPipeline(redis_url, pipeline) as made:
        yield made
