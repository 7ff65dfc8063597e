"""How a gateway is composed and started: `penstock gateway`."""

from penstock.config.addresses import Addresses
from penstock.config.settings import GatewayProcessSettings, load_group, load_settings
from penstock.ingest.gateway.app import create_app
from penstock.ingest.http.server import serve_app
from penstock.names import Pipeline
from penstock.ops.access import check_access
from penstock.ops.eviction import refuse_cluster_mode, watch_eviction
from penstock.redis.servers import store_server_lists
from penstock.telemetry.process import open_telemetry
from penstock.worker.heartbeat import choose_worker_name


def run_gateway(**given: object) -> None:
    """Serve OpenAI's API over the pipelines, until told to stop. `given`: settings of the gateway that come first."""
    addresses, settings = load_settings(Addresses), load_group(GatewayProcessSettings, gateway=given)
    refuse_cluster_mode(addresses)
    check_access(addresses, "gateway")
    store_server_lists(addresses.stream_url, Pipeline(addresses.pipeline))
    name, telemetry = choose_worker_name(""), settings.telemetry
    with (
        watch_eviction(addresses, settings.record.eviction),
        open_telemetry("penstock-gateway", addresses, name, telemetry, settings.traces, with_endpoint=False) as meters,
    ):
        app = create_app(settings, addresses, meters)
        serve_app(app, settings, app.state.gateway.begin_stop)
