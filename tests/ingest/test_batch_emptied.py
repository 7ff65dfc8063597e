"""Redis loses all that it has in the middle of batches: every line is answered, once."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from penstock.local.stack import Stack
from penstock.redis.client import redis_client
from sim.waiting import PATIENCE_S, wait_for
from tests.gateways import GatewayProcess
from tests.ingest.batch_files import each_once, finished, lines, read, read_file, result_ids, row, run_of
from tests.ingest.impatient import penstock
from tests.ingest.test_batch_run import start

ROWS, SHORT = 40, 24
"""Some are answered soon, the others one after the other."""


@pytest.fixture
def own(line: Stack, tmp_path: Path) -> Iterator[openai.OpenAI]:
    """The SDK at a gateway with a folder of its own."""
    settings = {"BATCH_STORE": str(tmp_path / "files"), "TESTING": '{"batch_look_s": 0.2}'}
    with (
        GatewayProcess(line.addresses, tmp_path, settings, penstock) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=None) as sdk,
    ):
        yield sdk


def test_a_redis_that_loses_everything_costs_no_line(line: Stack, own: openai.OpenAI, tmp_path: Path) -> None:
    """Twice: of a batch that a gateway works off, and of one from the command line.

    What lived in Redis alone is gone, and that is what its reader is told: the stream of a request that was answered.
    """
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lengths = [8 if number < SHORT else 40 + 10 * (number - SHORT) for number in range(ROWS)]
    source.write_bytes(lines([row(number, length) for number, length in enumerate(lengths)]))
    say = {"model": "demo", "prompt": "And the king", "max_tokens": 4}
    key = {"Idempotency-Key": "told-again"}
    said = own.completions.create(**say, temperature=0, extra_headers=key)  # type: ignore[call-overload]

    running = start(line, tmp_path, penstock)
    wait_for(output.exists, "the command begins")
    file = own.files.create(file=("in.jsonl", source.read_bytes()), purpose="batch")
    made = own.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    ours, theirs = f"chatcmpl-{run_of(output)}-", f"chatcmpl-{made.id.removeprefix('batch_')}-"

    def is_over() -> bool:
        return own.batches.retrieve(made.id).status == "completed"

    wait_for(lambda: result_ids(line, ours) and result_ids(line, theirs), "some results")
    assert running.is_alive()
    assert not is_over()
    with redis_client(line.addresses.stream_url) as redis:  # as an operator would do it by mistake
        redis.flushall()
    wait_for(lambda: result_ids(line, theirs) or is_over(), "more results")
    assert line._server is not None
    line._server.kill()  # as after a crash of a server that keeps nothing
    shutil.rmtree(line._server.directory / "appendonlydir")
    line._server.start()

    wait_for(is_over, "the batch's end", every_s=0.1)
    batch = own.batches.retrieve(made.id)
    assert batch.error_file_id is None
    assert each_once(read(own.files.content(batch.output_file_id or "").read()), ROWS)
    assert running.wait(PATIENCE_S) == 0, running.read_log_tail()
    assert finished(output) == ROWS
    assert each_once(read_file(output), ROWS)

    gone = httpx.get(f"{own.base_url}streams/{said.id}", timeout=None)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "stream_not_found")
    again = own.completions.create(**say, temperature=0, extra_headers=key)  # type: ignore[call-overload]
    assert (again.id, again.choices[0].text) == (said.id, said.choices[0].text)
