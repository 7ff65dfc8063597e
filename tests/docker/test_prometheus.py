"""Prometheus itself reads the files, and a running pipeline."""

import json
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from penstock.local.processes import find_free_port, start_child
from penstock.local.stack import Stack
from sim.forked import ForkedStack
from sim.waiting import PATIENCE_S, wait_for
from tests.docker.files import DOCKER, HERE, program, run
from tests.docker.queries import dashboard_queries, rules

ALERTS = {rule["alert"] for rule in rules() if "alert" in rule}
MAY_BE_EMPTY = {
    "Refused, by reason", "Answers of 500 and more", "Damaged, evicted, refused", "Could not be asked; computed again",
    "Taken over", "Tried again", "Dead letters",
}  # fmt: skip
"""Panels that show what does not happen in a pipeline that is well."""
PROMTOOL, PACKAGE = "promtool", "apt-get install prometheus"


@pytest.mark.proof
def test_promtool_accepts_configuration_and_rules() -> None:
    promtool = program(PROMTOOL, PACKAGE)
    run(promtool, "check", "config", DOCKER / "prometheus" / "prometheus.yml")
    run(promtool, "check", "rules", "--lint-fatal", DOCKER / "prometheus" / "rules.yml")


def test_every_alert_fires_where_it_must_and_only_there() -> None:
    run(program(PROMTOOL, PACKAGE), "test", "rules", HERE / "tests" / "docker" / "rules.test.yml")
    tests = (HERE / "tests" / "docker" / "rules.test.yml").read_text()
    assert all(f"{alert}" in tests for alert in ALERTS)


class Prometheus:
    """A server with the configuration of docker/, that finds its targets on this machine."""

    def __init__(self, directory: Path, targets: dict[str, int]) -> None:
        binary = program("prometheus", PACKAGE)
        self.port = find_free_port()
        config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(DOCKER / "prometheus" / name) for name in config["rule_files"]]
        for job in config["scrape_configs"]:
            port = (targets | {"prometheus": self.port})[job["job_name"]]
            job.pop("dns_sd_configs", None)
            job["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
        self.jobs = {job["job_name"] for job in config["scrape_configs"]}
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        self.child = start_child(
            [
                binary, f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn",
            ],
            name="Prometheus",
            log=directory / "prometheus.log",
        )  # fmt: skip

    def ask(self, path: str, **parameters: str) -> Any:
        """What its API says; None where it does not answer yet. Raises `ValueError` for what it does not take."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from None
        except OSError:
            return None

    def query(self, expression: str) -> list[Any]:
        """The series that an expression has now."""
        found = self.ask("query", query=expression)
        result: list[Any] = found["result"] if found else []
        return result

    def up(self) -> set[str]:
        """The jobs that could be scraped."""
        return {series["metric"]["job"] for series in self.query("up == 1")}


def test_prometheus_scrapes_a_running_pipeline_and_every_panel_has_something_to_show(tmp_path: Path) -> None:
    program("prometheus", PACKAGE)
    first = next(port for port in iter(find_free_port, None) if port % 2 == 0)
    ports = {"gateway": find_free_port(), "prefill": first, "decode": first + 1}
    environment = {"PENSTOCK_TELEMETRY_PORT": str(first), "PENSTOCK_ENGINE_POOL_MB": "64"}
    with ForkedStack(tmp_path / "stack", gateway=ports["gateway"], environment=environment) as stack:
        stack.wait_until_ready(PATIENCE_S)
        prometheus = Prometheus(tmp_path, ports)
        try:
            check_panels(stack, prometheus)
            check_probes(ports)
            assert stack._server is not None
            stack._server.kill()
            check_probes_without_redis(ports)
        finally:
            prometheus.child.kill()


def check_panels(stack: Stack, prometheus: Prometheus) -> None:
    generate_answers(stack.gateway_url)
    wait_for(lambda: prometheus.up() == prometheus.jobs, "all targets are up", every_s=0.1)
    alerts = [rule["name"] for group in prometheus.ask("rules", type="alert")["groups"] for rule in group["rules"]]
    assert {*alerts} == ALERTS
    counted = 'sum(penstock_requests_total{stage="decode", outcome=~"stop|length"}) >= 3'
    wait_for(lambda: prometheus.query(counted), "what was answered is counted", every_s=0.1)
    generate_answers(stack.gateway_url)

    def list_empty() -> set[str]:
        return {title for title, query in dashboard_queries() if not prometheus.query(query)} - MAY_BE_EMPTY

    wait_for(lambda: not list_empty(), "every panel has something", every_s=0.5)
    every = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in every} == {"ok"}


def generate_answers(gateway_url: str) -> None:
    with openai.OpenAI(base_url=f"{gateway_url}/v1", api_key="none", timeout=None) as client:
        for prompt in ("In the beginning " * 8, "In the beginning " * 8, "And it came to pass"):
            client.completions.create(model="demo", prompt=prompt, max_tokens=12)


def check_probes(ports: dict[str, int]) -> None:
    for port in ports.values():
        assert (fetch_status(port, "healthz"), fetch_status(port, "readyz")) == (200, 200)
    assert run_health_check(gateway=ports["gateway"], worker=find_free_port()) == 0
    assert run_health_check(gateway=find_free_port(), worker=ports["decode"]) == 0
    assert run_health_check(gateway=find_free_port(), worker=find_free_port()) == 1


def check_probes_without_redis(ports: dict[str, int]) -> None:
    for port in ports.values():
        wait_for(lambda port=port: fetch_status(port, "readyz") == 503, "it is not ready", every_s=0.1)  # type: ignore[misc]
        assert fetch_status(port, "healthz") == 200, "to be started again would not help it"


def fetch_status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def run_health_check(*, gateway: int, worker: int) -> int:
    """What the image's health check says where these are the ports."""
    environment = {"PENSTOCK_GATEWAY_PORT": str(gateway), "PENSTOCK_TELEMETRY_PORT": str(worker)}
    command = [sys.executable, str(DOCKER / "healthy")]
    return subprocess.run(command, env=environment, check=False).returncode
