"""`penstock`: up, gateway, generate, lag, worker, topics, kv, dlq, keys, usage, doctor, demo."""

import logging
import sys

import redis
import typer

from penstock.cli import batch, demo, dlq, doctor, gateway, generate, keys, kv, lag, topics, up, usage, worker
from penstock.errors import PenstockError, RequestError
from penstock.settings import check_environment

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
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)
app.add_typer(batch.app, name="batch")
app.add_typer(worker.app, name="worker")
app.add_typer(topics.app, name="topics")
app.add_typer(kv.app, name="kv")
app.add_typer(dlq.app, name="dlq")
app.add_typer(keys.app, name="keys")
app.command("usage")(usage.usage)


def main() -> None:
    """Run a command; an error that is ours is one line and exit code 1, not a traceback."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        check_environment()
        app()
    except redis.RedisError as error:
        print(f"penstock: Redis: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except PenstockError as error:
        code = f"{error.code}: " if isinstance(error, RequestError) else ""
        print(f"penstock: {code}{error}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


if __name__ == "__main__":
    main()
