"""What the SDK asks again by itself, what it is told not to, and that errors speak our words."""

import openai
import pytest

from penstock.local.stack import Stack
from penstock.waiting import wait_until
from tests.ingest.batch_files import result_ids


def test_what_came_too_late_is_not_asked_again(line: Stack, sdk: openai.OpenAI) -> None:
    """Nobody wants it any more, and it would come too late again."""
    before = len(result_ids(line, "cmpl-"))
    with pytest.raises(openai.InternalServerError) as late:
        sdk.with_options(max_retries=2).completions.create(
            model="demo", prompt="And the king", max_tokens=900,
            extra_body={"ignore_eos": True}, extra_headers={"x-penstock-deadline-s": "0.05"},
        )  # fmt: skip
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    wait_until(lambda: len(result_ids(line, "cmpl-")) > before, 60, "its result")
    assert len(result_ids(line, "cmpl-")) == before + 1
