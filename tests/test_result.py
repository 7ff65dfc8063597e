"""From a log to a result that its topic takes."""

from penstock.bus.contract import MAX_MESSAGE_BYTES
from penstock.messages import EndEvent, Job, Logprobs, Result, Sampling, TokenEvent, decode_message
from penstock.names import Pipeline
from penstock.worker.result import build_result, build_result_message


def test_a_text_that_no_topic_takes_is_cut_and_says_so() -> None:
    """A character of it is six bytes of JSON."""
    log = [TokenEvent(id=f"{n}-0", token=n, text="\x01" * 100_000, logprobs=Logprobs(logprob=0)) for n in range(40)]
    job = Job(id="r1", job="j1", sampling=Sampling(logprobs=0))
    result = build_result(job, "model", [*log, EndEvent(finish_reason="length")])
    assert result is not None
    message = build_result_message(Pipeline("p"), result, {"traceparent": "00-x"})
    assert MAX_MESSAGE_BYTES * 0.9 < message.num_bytes <= MAX_MESSAGE_BYTES
    found = decode_message(Result, message.value)
    assert found.truncated is True
    assert (found.finish_reason, found.token_ids, found.logprobs) == ("length", list(range(40)), None)
    assert result.text.startswith(found.text)


def test_a_text_that_fits_is_whole() -> None:
    job = Job(id="r1", job="j1")
    result = build_result(job, "model", [TokenEvent(id="0-0", token=1, text="a"), EndEvent(finish_reason="stop")])
    assert result is not None
    message = build_result_message(Pipeline("p"), result, {})
    assert b"truncated" not in message.value
    assert decode_message(Result, message.value) == result
