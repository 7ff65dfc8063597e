"""The OpenAPI document is true: schemathesis asks a running gateway for all that it says, and more."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import openai

from tests.ingest.batch_files import lines, row

HERE = Path(__file__).parent
ONE_IN = 3
"""Of the cases that are enumerated for the largest bodies, one in so many is sent."""


def test_every_answer_is_as_the_document_says(sdk: openai.OpenAI, base_url: str, tmp_path: Path) -> None:
    stream = sdk.completions.create(model="demo", prompt="In the beginning", max_tokens=4)
    file = sdk.files.create(file=("in.jsonl", lines([row(0)])), purpose="batch")
    known = {
        "STREAM_ID": stream.id, "FILE_ID": file.id, "ONE_IN": str(ONE_IN),
        "SCHEMATHESIS_HOOKS": "tests.ingest.schemathesis_hooks",
    }  # fmt: skip
    har = tmp_path / "answers.har"
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"),
        "run", f"{base_url}/openapi.json", "--report", "har", "--report-har-path", str(har), "--no-color",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=os.environ | known, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
    statuses = defaultdict(set)
    for entry in json.loads(har.read_text())["log"]["entries"]:
        method, path = entry["request"]["method"], entry["request"]["url"].removeprefix(base_url)
        statuses[method, path.partition("?")[0]].add(entry["response"]["status"])
    for name in ("chat/completions", "completions", "responses", "messages", "files", "batches"):
        assert statuses["POST", f"/v1/{name}"] >= {200, 400}, f"good and bad bodies were sent to {name}"
    assert 200 in statuses["GET", f"/v1/streams/{stream.id}"]
