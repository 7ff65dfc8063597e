"""The command `penstock`. Each of its commands is a module of this package."""

import io
import logging
import os
import sys
import tempfile
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

GROUPS = {
    "Serve a model and ask it": {
        "up": "Serve a model on this machine: Redis (where none is given), a worker, or several, and a "
        "gateway, until Ctrl-C.",
        "generate": "Send a prompt through the pipeline and print the answer as it comes.",
        "batch": "Send many requests from a file.",
        "demo": "Three prompts through a prefill and an auto worker: some are handed off, others answered in one hop.",
    },
    "See what it does": {
        "top": "Watch lag, workers, hit shares and latencies. q quits, p pauses, s sorts the workers, arrows scroll.",
        "lag": "Show what waits in each stage, in messages and tokens, and the estimated wait of a new request.",
        "usage": "Requests and tokens of each tenant, and what they cost. A gateway counts them as results come.",
        "explain": "Explain a request: its state, its workers, why it was sent there, and where its time went.",
    },
    "Find out what is wrong": {
        "doctor": "Check dependencies, addresses, topics, workers and the model. Exit code 1 when something fails.",
        "config": "Show the settings and where they come from, or check them.",
        "dlq": "Read and requeue dead letters: requests that nobody could answer.",
        "kv": "Look into the tiers of the KV store, and clear them.",
    },
    "Run the parts on several machines": {
        "plan": "Show how many prefill and decode workers the trace needs, from measured rates, and what a "
        "simulation says.",
        "autoscale": "Say how many workers of each kind the load needs, and why. It starts none: KEDA does, or "
        "`penstock up --auto`.",
        "worker": "Run one worker until SIGTERM.",
        "gateway": "Serve OpenAI's API over the pipelines, until SIGTERM. Any number of gateways may run beside "
        "each other.",
        "topics": "Create the pipeline's topics, or record their load.",
        "regions": "Show the regions that are copied here; adopt one that died.",
        "servers": "List or change the Redis servers that requests are spread over.",
        "models": "List or forget the models that were served.",
        "keys": "Manage the gateway's keys and tenants, where PENSTOCK_GATEWAY_KEYS says.",
        "weights": "Pack the weights of a model for the kernels.",
    },
}
"""The commands by their purpose, with the first line of each one's help. Importing all of them takes a second."""
COMMANDS = {name: line for commands in GROUPS.values() for name, line in commands.items()}

EXAMPLES = (
    "penstock up Qwen/Qwen3-0.6B", "penstock generate 'Once upon a time' --max-tokens 40",
    "penstock batch run requests.jsonl --output answers.jsonl", "penstock demo", "penstock top", "penstock lag --watch",
    "penstock usage --days 7", "penstock explain chat-42", "penstock doctor", "penstock config show",
    "penstock config check", "penstock dlq list", "penstock dlq show chat-42", "penstock dlq requeue chat-42",
    "penstock kv stats",
    "penstock kv evict --tier disk --older-than 7d", "penstock plan --trace trace.jsonl --ttft-s 2",
    "penstock autoscale --workers 1..6", "penstock worker auto", "penstock worker prefill",
    "penstock worker decode --next-name", "penstock worker endpoint", "penstock worker embed",
    "penstock gateway --host 0.0.0.0 --port 8080", "penstock topics create",
    "penstock topics rights shop shop-backend", "penstock topics record trace.jsonl",
    "penstock regions list", "penstock regions adopt eu", "penstock regions join --force",
    "penstock regions give-back eu",
    "penstock servers list", "penstock servers change", "penstock models list",
    "penstock models forget Qwen3-0.6B", "penstock keys create acme", "penstock keys list",
    "penstock keys revoke 3fa91c", "penstock keys tenant acme --weight 2",
    "penstock weights pack Qwen/Qwen3-0.6B --weights int8",
    "penstock weights fetch Qwen/Qwen3-0.6B 0123456789abcdef0123456789abcdef --from us",
)  # fmt: skip
"""An example of each command, which its help ends with. The help of a group ends with that of its first command."""


def add_example(command: Any, words: str) -> Any:
    """Let the help of a command, and of the commands in it, end with an example. `words`: how it is called."""
    command.epilog = "Example: " + next(line for line in EXAMPLES if f"{line} ".startswith(f"{words} "))
    for name, inner in getattr(command, "commands", {}).items():
        add_example(inner, f"{words} {name}")
    return command


class Commands(TyperGroup):
    """The commands. Only the module of the one that is run is imported."""

    def __init__(self, **given: Any) -> None:
        """Register each command with the first line of its help."""
        super().__init__(**given)
        self.commands = {
            name: TyperCommand(name, help=line, rich_help_panel=group)
            for group, commands in GROUPS.items()
            for name, line in commands.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the command that is run, with its module loaded. Raises `SettingsError` for an unknown setting."""
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None, "an unknown name raises"
        return name, load_command(name), rest


def load_command(name: str) -> Any:
    """Return a command from its module: the `app` with commands of its own, or the function of the same name."""
    from penstock.config.settings import check_environment

    if name != "config":  # that command reports everything that is wrong
        check_environment()
    module, parent = import_module(f"penstock.cli.{name}"), typer.Typer()
    if hasattr(module, "app"):
        parent.add_typer(module.app, name=name)
    else:
        parent.command(name)(getattr(module, name))
    return add_example(typer.main.get_group(parent).commands[name], f"penstock {name}")


app = typer.Typer(
    cls=Commands,
    name="penstock",
    epilog=f"Example: {EXAMPLES[0]}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def print_version(is_asked: bool) -> None:
    """Print the version and end, if that is asked for."""
    if is_asked:
        from importlib.metadata import version

        typer.echo(version("penstock"))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Durable, disaggregated LLM inference. Settings come from PENSTOCK_… variables (docs/settings.md)."""


def find_temporary_directory() -> None:
    """Have temporary files in shared memory where they can be nowhere else, as in a container that is all read-only.

    Without a place for them transformers cannot be imported.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        os.environ["TMPDIR"] = "/dev/shm"


def main() -> None:
    """Run a command. An error of Penstock or Redis is printed as one line, without a traceback. The exit status is 1,
    or 78 for a model that cannot be loaded with these files and settings.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale of 8 bits has no arrows
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    find_temporary_directory()
    try:
        app()
    except Exception as error:
        from penstock.cli.error_lines import explain_error

        line = explain_error(error)
        if line is None:
            raise
        print(f"penstock: {line}", file=sys.stderr)  # noqa: T201
        sys.exit(getattr(error, "exit_status", 1))


if __name__ == "__main__":
    main()
