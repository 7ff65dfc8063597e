"""The dashboard and the rules, by what they ask for."""

import re

import pytest
import yaml

from tests.docker.files import DOCKER, compose
from tests.docker.queries import dashboard, dashboard_queries, rules, wrong_names

ROWS = ["Pipeline", "Gateway", "Prefill", "KV store", "Decode", "What failed"]


def test_the_dashboard_is_in_order() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == ROWS
    places = {(x, y) for one in panels for x, y in _cells(one["gridPos"])}
    assert len(places) == sum(one["gridPos"]["w"] * one["gridPos"]["h"] for one in panels), "none lies over another"
    assert all(x < 24 for x, _ in places)


def _cells(place: dict[str, int]) -> list[tuple[int, int]]:
    xs, ys = (range(place[start], place[start] + place[size]) for start, size in (("x", "w"), ("y", "h")))
    return [(x, y) for x in xs for y in ys]


def test_every_panel_asks_the_source_that_was_chosen() -> None:
    asked = [part for panel in dashboard()["panels"] if panel["type"] != "row" for part in (panel, *panel["targets"])]
    assert all(part["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for part in asked)
    variables = {variable["name"]: variable for variable in dashboard()["templating"]["list"]}
    assert variables.keys() == {"datasource", "pipeline"}
    assert not wrong_names(re.sub(r"label_values\((\w+), (\w+)\)", r"\1 by (\2)", variables["pipeline"]["definition"]))


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


def test_grafana_is_given_the_source_and_the_dashboard() -> None:
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "penstock.yml").read_text())["providers"]
    volumes = compose()["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in volumes
    assert "./grafana/provisioning:/etc/grafana/provisioning:ro" in volumes
