"""`penstock weights pack`: write the packed weights of a model into a file, which workers map when they start."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from penstock.cli.kv_show import format_bytes
from penstock.config.settings import EngineSettings, load_settings
from penstock.engine.weights.files import check_model_here, ignore_progress

app = typer.Typer(help="Pack the weights of a model for the kernels.", no_args_is_help=True)


@app.callback()
def add_group() -> None:
    """Pack the weights of a model for the kernels."""


@app.command("pack")
def pack_weights(
    model: Annotated[str, typer.Argument(help="A directory or a hub name, as in PENSTOCK_ENGINE_MODEL.")],
    weights: Annotated[
        Literal["auto", "p12", "int8", "int4", "bf16"] | None,
        typer.Option(help="The form of the weights; PENSTOCK_ENGINE_WEIGHTS."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file. Without it, one beside the model, or in the cache, that is found.")
    ] = None,
) -> None:
    """Load and prove a model, and write its packed weights into a file. Workers of these settings then map it."""
    check_model_here(model, ignore_progress)
    from penstock.engine.opening import pack_model

    given = {"model": model} | ({"weights": weights} if weights else {})
    file = pack_model(load_settings(EngineSettings, **given), out)
    stored = file.about["checkpoint_bytes"]
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"wrote {escape(str(file.path))}: {format_bytes(file.num_bytes)}, {format_bytes(stored)} as stored")
    if out is not None:
        console.print("a worker maps it with PENSTOCK_ENGINE_PACKED set to this path")
