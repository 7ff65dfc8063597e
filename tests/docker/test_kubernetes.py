"""The manifests, against the schemas of Kubernetes and KEDA and what the processes do; and what asks for metrics."""

from importlib import import_module
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock.ingest.gateway.health import router
from tests.docker.files import DOCKER, check_settings, manifest, manifests, megabytes
from tests.docker.queries import dashboard_queries, rules, wrong_names

FILES = [(file, one) for file, one in manifests() if one["kind"] != "ScaledObject"]
SCALED = [one for _, one in manifests() if one["kind"] == "ScaledObject"]
CONFIG: dict[str, str] = manifest("ConfigMap", "penstock")["data"]
SECRET: dict[str, str] = manifest("Secret", "penstock")["stringData"]
WORKERS = ("auto", "decode", "prefill")
DEPLOYED = ("gateway", *WORKERS)


def pod(component: str) -> dict[str, Any]:
    """A deployment's pod."""
    spec: dict[str, Any] = manifest("Deployment", f"penstock-{component}")["spec"]["template"]["spec"]
    return spec


def pods() -> list[dict[str, Any]]:
    """All pods, the job's too."""
    return [one["spec"]["template"]["spec"] for _, one in FILES if one["kind"] in {"Deployment", "Job"}]


@pytest.mark.proof
@pytest.mark.parametrize(("file", "one"), FILES, ids=[f"{file}-{one['kind']}" for file, one in FILES])
def test_it_is_as_kubernetes_wants_it(file: str, one: dict[str, Any]) -> None:
    kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)


def test_scaling_is_as_keda_wants_it() -> None:
    keda = import_module("cloudcoil.models.keda.v1alpha1")
    assert len(SCALED) == 3
    for one in SCALED:
        taken = keda.ScaledObject.model_validate(one)
        assert taken.model_dump(mode="json", by_alias=True, exclude_unset=True) == one, "no field is unknown"


@pytest.mark.proof
def test_kustomize_has_all_but_the_template_of_the_secret_and_the_stages_apart() -> None:
    folder = DOCKER / "kubernetes"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())
    others = {"kustomization.yaml", "secret.example.yaml", "prefill.yaml", "decode.yaml"}
    assert {*listed["resources"]} == {file.name for file in folder.glob("*.yaml")} - others
    assert {container["image"] for one in pods() for container in one["containers"]} == {listed["images"][0]["name"]}


def test_what_is_configured_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    check_settings(CONFIG | SECRET, monkeypatch)
    assert not CONFIG.keys() & SECRET.keys()


def test_who_is_told_to_stop_has_the_time() -> None:
    for component in WORKERS:
        assert pod(component)["terminationGracePeriodSeconds"] >= float(CONFIG["PENSTOCK_WORKER_DRAIN_S"]) + 20
    pause_s = pod("gateway")["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod("gateway")["terminationGracePeriodSeconds"] >= pause_s + float(CONFIG["PENSTOCK_GATEWAY_STOP_S"]) + 10


@pytest.mark.proof
def test_probes_ask_what_is_answered() -> None:
    answered = {getattr(route, "path", "") for route in router.routes}
    for component in DEPLOYED:
        (container,) = pod(component)["containers"]
        ports = {port["name"] for port in container["ports"]}
        probes = [container[kind]["httpGet"] for kind in ("livenessProbe", "readinessProbe")]
        assert [probe["path"] for probe in probes] == ["/healthz", "/readyz"]
        assert {probe["path"] for probe in probes} <= answered
        assert {probe["port"] for probe in probes} <= ports


def test_memory_holds_what_is_put_into_it() -> None:
    shared_mb, pool_mb = (int(CONFIG[f"PENSTOCK_{name}"]) for name in ("KV_STORE_SHARED_MB", "ENGINE_POOL_MB"))
    for component in WORKERS:
        (memory,) = (volume["emptyDir"] for volume in pod(component)["volumes"] if volume["name"] == "memory")
        (container,) = pod(component)["containers"]
        assert {"name": "memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert memory["medium"] == "Memory"
        assert megabytes(memory["sizeLimit"]) > shared_mb
        assert megabytes(container["resources"]["limits"]["memory"]) > megabytes(memory["sizeLimit"]) + pool_mb + 1024


def test_workers_are_scaled_to_what_the_controller_says_and_no_further_than_there_are_partitions() -> None:
    """KEDA divides the answer by the target, and rounds up: 1 passes it on. It reads a path of names with dots."""
    (service,) = (one for _, one in FILES if one["kind"] == "Service")
    namespace = manifest("Namespace", "penstock")["metadata"]["name"]
    for kind, one in zip(WORKERS, SCALED, strict=True):
        spec = one["spec"]
        assert spec["scaleTargetRef"]["name"] == f"penstock-{kind}"
        assert 0 == spec["minReplicaCount"] < spec["maxReplicaCount"] <= int(CONFIG["PENSTOCK_BUS_PARTITIONS"])
        assert "replicas" not in manifest("Deployment", f"penstock-{kind}")["spec"]
        (controller,) = pod("autoscale")["containers"]
        assert controller["args"][-1] == f"{spec['minReplicaCount']}..{spec['maxReplicaCount']}"
        (trigger,) = spec["triggers"]
        assert trigger["type"] == "metrics-api"
        host = f"{service['metadata']['name']}.{namespace}.svc"
        assert trigger["metadata"] == {
            "url": f"http://{host}/v1/penstock/autoscale", "valueLocation": f"workers.{kind}", "targetValue": "1",
        }  # fmt: skip


def test_at_most_one_pod_of_a_kind_is_evicted_at_once_and_a_gateway_stays() -> None:
    budgets = [one for _, one in FILES if one["kind"] == "PodDisruptionBudget"]
    assert [one["metadata"]["name"] for one in budgets] == [f"penstock-{one}" for one in sorted(DEPLOYED)]
    for one in budgets:
        assert one["spec"]["selector"] == manifest("Deployment", one["metadata"]["name"])["spec"]["selector"]
        is_gateway = one["metadata"]["name"] == "penstock-gateway"
        assert one["spec"].get("minAvailable" if is_gateway else "maxUnavailable") == 1


def test_every_query_names_a_metric_that_exists() -> None:
    assert len(dashboard_queries()) > 50
    assert not {title: wrong for title, query in dashboard_queries() if (wrong := wrong_names(query))}
    assert not {rule["expr"]: wrong for rule in rules() if (wrong := wrong_names(rule["expr"]))}


@pytest.mark.parametrize(
    "query",
    ["penstock_itl", "sum by (tier) (penstock_lag_token)", 'penstock_running{tier="shm"}', "penstock_kv_blocks"],
)
def test_a_name_that_does_not_exist_is_found(query: str) -> None:
    assert wrong_names(query)
