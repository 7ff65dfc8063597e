"""`penstock gateway`: one gateway process."""

from typing import Annotated

import typer

from penstock.config.addresses import Addresses
from penstock.config.settings import GatewayProcessSettings, check_together, load_group, load_settings
from penstock.errors import DependencyMissing, SettingsError
from penstock.names import Pipeline
from penstock.ops.access import check_access
from penstock.redis.servers import store_server_lists
from penstock.telemetry.process import open_telemetry
from penstock.worker.heartbeat import choose_worker_name


def gateway(
    host: Annotated[
        str | None, typer.Option(help="Where to listen; 127.0.0.1 unless the settings say otherwise.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The port; 8080 unless the settings say otherwise.")] = None,
) -> None:
    """Serve OpenAI's API over the pipelines, until SIGTERM. Any number of gateways may run beside each other."""
    try:
        from penstock.ingest.gateway.server import serve_gateway
    except ImportError as error:
        raise DependencyMissing(f"a gateway needs pip install 'penstock[gateway]' ({error})") from None
    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    addresses, settings = load_settings(Addresses), load_group(GatewayProcessSettings, gateway=given)
    if wrong := check_together(settings.guard, settings.batch):
        raise SettingsError(wrong[0])
    check_access(addresses, "gateway")
    store_server_lists(addresses.stream_url, Pipeline(addresses.pipeline))
    name, telemetry = choose_worker_name(""), settings.telemetry
    with open_telemetry("penstock-gateway", addresses, name, telemetry, settings.traces, with_endpoint=False) as meters:
        serve_gateway(settings, addresses, meters)
