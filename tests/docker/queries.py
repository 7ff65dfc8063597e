"""What PromQL expressions ask for, held against the catalog of metrics."""

import json
import re
from typing import Any

import yaml

from penstock.telemetry.catalog import CATALOG
from tests.docker.files import DOCKER

COMMON = {"le", "job", "instance"}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


SERIES = {
    f"{metric.prometheus}{part}": {*metric.prometheus_labels}
    for metric in CATALOG
    for part in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}
"""Every series that processes of ours expose, with its labels."""
LABELS = set.union(*SERIES.values())


def rules() -> list[dict[str, Any]]:
    """All rules, recording and alerting."""
    groups = yaml.safe_load((DOCKER / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    loaded: dict[str, Any] = json.loads((DOCKER / "grafana" / "dashboards" / "penstock.json").read_text())
    return loaded


def dashboard_queries(pipeline: str = "demo", interval: str = "1m") -> list[tuple[str, str]]:
    """Title of the panel and expression, with the dashboard's variables filled in."""
    return [
        (panel["title"], target["expr"].replace("$pipeline", pipeline).replace("$__rate_interval", interval))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def wrong_names(expression: str) -> set[str]:
    """Metrics and labels in it that nothing of ours has."""
    bare = _STRING.sub('""', expression)
    names = set(re.findall(r"\b(?:penstock|gen_ai)[\w:]*", bare))
    wrong = names - SERIES.keys() - RECORDED - LABELS
    for name, selector in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", bare):
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        wrong |= {
            f"{name}{{{label}}}" for label in asked - SERIES.get(name, LABELS | {"alertname", "alertstate"}) - COMMON
        }
    for listed in re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", bare):
        wrong |= {label.strip() for label in listed.split(",") if label.strip()} - LABELS - COMMON
    return wrong
