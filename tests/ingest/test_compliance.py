"""A suite of others that says what an API must answer, against a gateway with the model that calls tools."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.local.stack import Stack
from sim.workload import TOOL_MODEL

MODEL = str(TOOL_MODEL)
IMAGES = {"chat-image-input", "image-input", "anth-image-input"}
"""The tool model reads text."""
COMPACTING = {"compact-response"}
"""The suite warns of servers that do not compact."""


def build_greedy(build_request: Callable[[Any], dict[str, Any]], config: Any) -> dict[str, Any]:
    """Build a test's request so that the model, small as it is, answers it each time alike."""
    return build_request(config) | {"temperature": 0}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the suite's use of jsonschema
@pytest.mark.parametrize(("form", "num_tests"), [("openai-chat", 9), ("open-responses", 13), ("anthropic", 9)])
def test_llm_comply_finds_nothing_missing_but_images(tool_stack: Stack, form: str, num_tests: int) -> None:
    """Its one test of reasoning's summaries it leaves out itself: that is for models of OpenAI's names."""
    cli, llm_comply = pytest.importorskip("llm_comply.cli"), pytest.importorskip("llm_comply")
    tests = [
        dataclasses.replace(one, build_request=partial(build_greedy, one.build_request)) for one in cli._get_tests(form)
    ]
    specification = Path(cli.__file__).parent / "specs" / cli._SPEC_FILES[form]
    config = llm_comply.ComplianceConfig(f"{tool_stack.gateway_url}/v1", "none", MODEL, timeout=3600)
    suite = llm_comply.TestRunner(config, tests, llm_comply.SpecLoader(str(specification))).run_all()
    results = {one["id"]: one for one in suite.to_dict()["results"]}
    assert (len(results), suite.skipped) == (num_tests, 1), results
    assert {name for name, one in results.items() if one["status"] == "failed"} == results.keys() & IMAGES, results
    assert {name for name, one in results.items() if one.get("warnings")} <= COMPACTING, results
