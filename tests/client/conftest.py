"""Both clients behind one face: each test body runs with `Client` and with `AsyncClient`."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest

from penstock.client import AsyncClient, Client
from penstock.names import Pipeline


class Blocking:
    """`AsyncClient` for a test without an event loop: its calls block, its streams are plain iterators."""

    def __init__(self, runner: asyncio.Runner, client: AsyncClient) -> None:
        self._runner = runner
        self._client = client

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._iterate(self._client.stream(*args, **kwargs))

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return self._iterate(self._client.generate(*args, **kwargs))

    def _iterate(self, events: AsyncIterator[Any]) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._runner.run(cast(Any, anext(events)))
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(cast(Any, events).aclose())

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self._runner.run(method(*args, **kwargs))


@pytest.fixture(params=["sync", "async"])
def client(request: pytest.FixtureRequest, redis_url: str, pipeline: Pipeline) -> Iterator[Client]:
    if request.param == "sync":
        with Client(redis=redis_url, pipeline=pipeline.name) as plain:
            yield plain
        return
    with asyncio.Runner() as runner:
        awaited = AsyncClient(redis=redis_url, pipeline=pipeline.name)
        yield cast(Client, Blocking(runner, awaited))
        runner.run(awaited.close())
