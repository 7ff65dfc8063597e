"""The official Node SDK and the AI SDK, as npm has them, against a running gateway: `tests/ingest/node/`."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.ingest import nodejs

SOURCE = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nodejs.project(SOURCE, tmp_path_factory.mktemp("sdk"))


@pytest.mark.parametrize(
    ("file", "stack"), [("answers.test.mjs", "line"), ("tools.test.mjs", "tool_stack")], ids=["answers", "tools"]
)
def test_the_node_sdk(file: str, stack: str, project: Path, request: pytest.FixtureRequest) -> None:
    base_url = request.getfixturevalue(stack).gateway_url
    done = subprocess.run(
        [nodejs.NODE, "--experimental-eventsource", "--test", "--test-reporter=spec", file],
        cwd=project, env=os.environ | {"GATEWAY": base_url}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "ℹ pass 0" not in done.stdout
    assert "ℹ fail 0" in done.stdout
