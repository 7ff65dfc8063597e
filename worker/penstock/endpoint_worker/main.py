"""Composes and starts an endpoint worker: `penstock worker endpoint`."""

import logging

from penstock.endpoint_worker.endpoints import Endpoints, parse_urls
from penstock.endpoint_worker.engine import EndpointEngine
from penstock.endpoint_worker.reply import list_models
from penstock.endpoint_worker.role import EndpointRole
from penstock.errors import SettingsError
from penstock.grammar.tools import ENDPOINT_TEMPLATE
from penstock.redis.client import backoff_pauses
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.loop import StopSignal
from penstock.worker.process import WorkerProcess

log = logging.getLogger(__name__)


def run_endpoint_worker(*, next_name: bool = False) -> None:
    """Turn requests into token streams and results, by asking servers with OpenAI's API, until told to stop."""
    process = WorkerProcess("endpoint", next_name=next_name)
    settings = process.settings.endpoint
    endpoints = Endpoints(parse_urls(settings.urls, settings.max_requests, settings.key, settings.model))
    with process:
        model = endpoints.all[0].model or settings.model or find_model(endpoints, process.beat, process.stop)
        if model is None:
            return
        given = process.settings.engine
        name = given.served_name or (given.model if "model" in given.model_fields_set else model)
        metrics = process.make_metrics(name)
        asked = settings.model_copy(update={"model": model})
        engine = EndpointEngine(endpoints, asked, process.settings.record, metrics.count_retry)
        log.info("worker %s sends requests to %s", process.name, ", ".join(one.url for one in endpoints.all))
        process.serve(EndpointRole(process.pipeline, name, engine), metrics, response_template=ENDPOINT_TEMPLATE)


def find_model(endpoints: Endpoints, beat: Heartbeat, stop: StopSignal) -> str | None:
    """Return the one model that the endpoints serve, as soon as one of them answers; None where told to stop.

    Raises `SettingsError` for an endpoint with several models.
    """
    waits = backoff_pauses()
    while not stop:
        for endpoint in endpoints.all:
            try:
                names = [str(one["id"]) for one in list_models(endpoint.url, endpoint.key)]
            except OSError as error:
                beat.update_status(doing=f"waiting for {endpoint.url} ({error})")
                log.warning("listing the models of endpoint %s failed, retrying: %s", endpoint.url, error)
                continue
            if len(names) == 1:
                return names[0]
            listed = ", ".join(names) or "no model"
            raise SettingsError(f"{endpoint.url} serves {listed}: name one in PENSTOCK_ENDPOINT_MODEL")
        stop.wait(next(waits))
    return None
