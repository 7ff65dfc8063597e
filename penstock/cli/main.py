"""`penstock` and its commands, one file each."""

import logging
import sys

import redis
import typer

from penstock.access import check_access
from penstock.cli import (
    batch,
    config,
    demo,
    dlq,
    doctor,
    gateway,
    generate,
    keys,
    kv,
    lag,
    plan,
    servers,
    top,
    topics,
    up,
    usage,
    worker,
)
from penstock.errors import AccessRefused, BusUnavailable, PenstockError, RequestError, SettingsError
from penstock.settings import Addresses, check_environment, load

app = typer.Typer(
    name="penstock",
    help="Durable, disaggregated LLM inference. Settings come from PENSTOCK_… variables (docs/settings.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("gateway")(gateway.gateway)
app.command("generate")(generate.generate)
app.command("lag")(lag.lag)
app.command("top")(top.top)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.add_typer(batch.app, name="batch")
app.add_typer(config.app, name="config")
app.add_typer(worker.app, name="worker")
app.add_typer(topics.app, name="topics")
app.add_typer(kv.app, name="kv")
app.add_typer(servers.app, name="servers")
app.add_typer(dlq.app, name="dlq")
app.add_typer(keys.app, name="keys")
app.command("usage")(usage.usage)


def main() -> None:
    """Run a command; an error that is ours is one line and exit code 1, not a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        if sys.argv[1:2] != ["config"]:  # which tells everything that is wrong
            check_environment()
        app()
    except (redis.RedisError, PenstockError) as error:
        print(f"penstock: {explained(error)}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def explained(error: Exception) -> str:
    """An error in one line. Where a server cannot be worked with it is asked why: clients know little."""
    if isinstance(error, redis.RedisError | BusUnavailable):
        try:
            check_access(load(Addresses), "client")
        except (SettingsError, AccessRefused) as refused:
            return str(refused)
    prefix = "Redis: " if isinstance(error, redis.RedisError) else ""
    return f"{error.code}: {error}" if isinstance(error, RequestError) else f"{prefix}{error}"


if __name__ == "__main__":
    main()
