"""Files and batches through the official SDK, against real gateways and workers."""

from typing import Any

import openai
import pytest

from penstock.local.stack import Stack
from sim.waiting import PATIENCE_S, wait_for
from tests.ingest.batch_files import each_once, lines, read, result_ids, row, wait_for_results

pytestmark = pytest.mark.proof


def make(sdk: Any, content: bytes) -> Any:
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    return sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def ended(sdk: Any, batch_id: str) -> Any:
    over = ("completed", "failed", "cancelled", "expired")
    wait_for(lambda: sdk.batches.retrieve(batch_id).status in over, "the batch's end", every_s=0.1)
    return sdk.batches.retrieve(batch_id)


def content_of(sdk: Any, file_id: str | None) -> bytes:
    return b"" if file_id is None else sdk.files.content(file_id).read()


def test_a_file_comes_back_as_it_went(sdk: Any) -> None:
    content = bytes(range(256)) * 1000
    made = sdk.files.create(
        file=("späte worte.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (made.bytes, made.filename, made.purpose) == (len(content), "späte worte.jsonl", "batch")
    assert made.expires_at == made.created_at + 3600
    assert sdk.files.retrieve(made.id) == made
    assert sdk.files.content(made.id).read() == content
    assert sdk.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        sdk.files.content(made.id)


def test_lists_come_in_pages(sdk: Any) -> None:
    made = [sdk.files.create(file=(f"{number}.jsonl", b"{}"), purpose="batch").id for number in range(5)]
    listed = [file.id for file in sdk.files.list(limit=2, order="asc", after=made[0])]
    assert listed == made[1:]
    assert [file.id for file in sdk.files.list(limit=2)][:5] == made[::-1]
    assert sdk.files.list(purpose="batch_output", after=made[0], order="asc").data == []


def test_what_is_no_upload_is_refused(sdk: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        sdk.files.create(file=("in.jsonl", b"{}"), purpose="assistants")
    with pytest.raises(openai.APIStatusError) as caught:
        sdk.files.create(file=("in.jsonl", b"x" * 600_001), purpose="batch")
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="multipart"):
        sdk.post("/files", cast_to=object, body={"purpose": "batch"})


def test_a_batch_is_answered_and_a_bad_row_fails_alone(sdk: Any) -> None:
    rows = [row(number) for number in range(20)]
    rows[3] = row(3, temperature=99)
    rows[7] = row(7, tools=[{"type": "function", "function": {"name": "f"}}])
    rows[9] = row(9, n=2)
    made = make(sdk, lines(rows))
    assert made.status == "validating"
    batch = ended(sdk, made.id)
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 18, "failed": 2}
    answers, failed = read(content_of(sdk, batch.output_file_id)), read(content_of(sdk, batch.error_file_id))
    assert each_once([*answers, *failed], 20)
    refused = {one["custom_id"]: one["response"] for one in failed}
    params = {name: (one["status_code"], one["body"]["error"]["param"]) for name, one in refused.items()}
    assert params == {"row-3": (400, "temperature"), "row-7": (400, "tools")}
    by_id = {one["custom_id"]: one["response"]["body"] for one in answers}
    direct = sdk.post("/chat/completions", cast_to=openai.types.chat.ChatCompletion, body=rows[5]["body"])
    assert by_id["row-5"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    assert len(by_id["row-9"]["choices"]) == 2
    assert by_id["row-9"]["usage"]["completion_tokens"] == 12
    assert made.id in [one.id for one in sdk.batches.list(limit=1)]
    with pytest.raises(openai.ConflictError):
        sdk.batches.cancel(made.id)


def test_a_batch_goes_on_when_its_gateway_is_killed(line: Stack, sdk: Any) -> None:
    """Every line once, in the output and in the results topic: nothing that was finished is asked again."""
    count = 250
    made = make(sdk, lines([row(number, 16) for number in range(count)]))
    asked = f"chatcmpl-{made.id.removeprefix('batch_')}-"
    wait_for(lambda: len(result_ids(line, asked)) > 40, "some results")
    gateway = line.gateway
    assert gateway is not None
    assert gateway.child is not None
    gateway.child.kill()
    gateway.was_ready = False
    line.wait_until_ready(PATIENCE_S)
    batch = ended(sdk, made.id)
    assert batch.status == "completed"
    assert each_once(read(content_of(sdk, batch.output_file_id)), count)
    ids = wait_for_results(line, asked, count)
    assert len(ids) == len(set(ids)) == count
