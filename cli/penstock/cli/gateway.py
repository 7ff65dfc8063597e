"""`penstock gateway`: one gateway process."""

from typing import Annotated

import typer

from penstock.errors import DependencyMissing


def gateway(
    host: Annotated[
        str | None, typer.Option(help="Where to listen; 127.0.0.1 unless the settings say otherwise.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The port; 8080 unless the settings say otherwise.")] = None,
) -> None:
    """Serve OpenAI's API over the pipelines, until SIGTERM. Any number of gateways may run beside each other."""
    try:
        from penstock.ingest.main import run_gateway
    except ImportError as error:
        raise DependencyMissing(f"a gateway needs pip install 'penstock[gateway]' ({error})") from None
    run_gateway(**{name: value for name, value in (("host", host), ("port", port)) if value is not None})
