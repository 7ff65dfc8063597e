"""Dashboards, rules and scalers ask for metrics that exist."""

import pytest

from tests.docker.queries import dashboard_queries, rules, wrong_names


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
