"""The clients: send requests and read their streams. `Client` and `AsyncClient` are the way in."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient as AsyncClient
    from penstock.client.core import Answer as Answer
    from penstock.client.sync import Client as Client

__all__ = ["Answer", "AsyncClient", "Client"]
_HOMES = {"Answer": "penstock.client.core", "AsyncClient": "penstock.client.aio", "Client": "penstock.client.sync"}


def __getattr__(name: str) -> Any:
    """Import a client when a caller asks for it: an import of one submodule then does not load the others."""
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.client' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
