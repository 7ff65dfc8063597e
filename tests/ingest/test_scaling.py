"""`GET /v1/penstock/autoscale`, which KEDA's `metrics-api` scaler asks."""

import math
from typing import Any

import httpx
import pytest

from penstock.config.addresses import Addresses
from penstock.config.settings import GatewayProcessSettings, load_group
from penstock.ingest.gateway.app import create_app
from penstock.names import Pipeline
from penstock.ops.scaling import ScalingLease
from penstock.redis.client import redis_client
from tests.docker.files import manifests

TOLD: dict[str, Any] = {
    "at": 1.0, "workers": {"auto": 3, "prefill": 0, "decode": 0}, "reasons": {"auto": "backlog"}, "alerts": [],
    "leave": {"auto": "auto-2"}, "predicted_ttft_p99_s": 2.0, "observed_ttft_p99_s": None, "state": {"kinds": {}},
    "starting": {"auto": 1},
}  # fmt: skip
TRIGGERS = [one["spec"]["triggers"][0]["metadata"] for _, one in manifests() if one["kind"] == "ScaledObject"]


def read_as_keda(answer: httpx.Response, trigger: dict[str, str]) -> int:
    """Return how many replicas the `metrics-api` scaler asks for, by its rules: the number at a path of names with dots
    in the JSON of a 200, divided by the target and rounded up. All else is an error, and nothing is scaled.
    """
    assert trigger.keys() == {"url", "valueLocation", "targetValue"}, "the format is JSON unless it is given"
    assert answer.status_code == 200
    value: Any = answer.json()
    for name in trigger["valueLocation"].split("."):
        value = value[name]
    assert type(value) in (int, float)
    return math.ceil(float(value) / float(trigger["targetValue"]))


@pytest.mark.proof
async def test_keda_is_told_the_numbers_and_nothing_where_no_controller_runs(
    addresses: Addresses, pipeline: Pipeline
) -> None:
    app = create_app(load_group(GatewayProcessSettings), addresses)
    transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        silent = await client.get("/v1/penstock/autoscale")
        assert (silent.status_code, silent.json()["error"]["code"]) == (404, "no_decision")
        with redis_client(addresses.stream_url) as server:
            assert ScalingLease(server, pipeline, "a").publish_decision(TOLD)
            assert not ScalingLease(server, pipeline, "b").publish_decision(TOLD | {"workers": {}})
        answer = await client.get("/v1/penstock/autoscale")
    await app.state.gateway.redis.aclose()
    assert {one["valueLocation"]: read_as_keda(answer, one) for one in TRIGGERS} == {
        f"workers.{kind}": number for kind, number in TOLD["workers"].items()
    }
    told = answer.json()
    assert told["leave"] == {"auto": "auto-2"}
    assert "state" not in told
