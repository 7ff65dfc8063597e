"""`penstock servers`: the Redis servers that requests are spread over."""

import redis
import typer
from rich.console import Console
from rich.table import Table

from penstock.bus.connect import connect_bus
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, load_settings
from penstock.errors import ServersDiffer
from penstock.names import Pipeline
from penstock.ops.status import read_worker_status
from penstock.redis.client import redis_client
from penstock.redis.servers import Sharded, describe_server_list, replace_server_list
from penstock.redis.urls import hide_password, split_urls

app = typer.Typer(help="List or change the Redis servers that requests are spread over.", no_args_is_help=True)


@app.command("list")
def list_servers() -> None:
    """Each server, and the list of servers that is stored on it."""
    addresses = load_settings(Addresses)
    pipeline, clients = Pipeline(addresses.pipeline), Sharded.from_urls(addresses.stream_url, redis_client)
    table = Table("name", "address", "its list", box=None, pad_edge=False)
    for name, url, client in zip(clients.names, split_urls(addresses.stream_url), clients.parts, strict=True):
        table.add_row(name, hide_password(url), _read_server_list(client, pipeline))
    Console(highlight=False).print(table)


@app.command("change")
def change_servers() -> None:
    """Tell all servers the list of PENSTOCK_STREAM_URL: when no worker runs, and nothing is under way.

    Requests wait in their topics meanwhile. A request that has begun and not ended would begin again on another server.
    """
    addresses = load_settings(Addresses)
    pipeline, clients = Pipeline(addresses.pipeline), Sharded.from_urls(addresses.stream_url, redis_client)
    if running := [worker["name"] for worker in read_worker_status(addresses)]:
        raise ServersDiffer(f"{', '.join(running)} still run: stop all workers and gateways before the list is changed")
    unsettled = connect_bus(addresses, load_settings(BusSettings)).count_unsettled()
    jobs = sum(unsettled[topic] for topic in pipeline.input_topics("decode").values())
    if jobs:
        raise ServersDiffer(
            f"{jobs} jobs wait for decode: run the workers with the list as it was until `penstock lag` says 0, and "
            "change it then"
        )
    for client in clients.parts:
        replace_server_list(client, pipeline, clients.names)
    Console(highlight=False).print(f"{pipeline.name}: {', '.join(clients.names)}")


def _read_server_list(client: "redis.Redis", pipeline: Pipeline) -> str:
    """Return the list that is stored on a server, in words, or that the server is away."""
    try:
        found: object = client.get(pipeline.servers_key)
    except redis.RedisError as error:
        return f"away: {error}"
    return describe_server_list(found.decode()) if isinstance(found, bytes) else "none yet"
