"""What a prompt that does not fit is told: numbers that are true, or a bound that says it is one."""

import pytest

from penstock.errors import PromptTooLong, UnknownModel
from penstock.messages import Request, Sampling
from penstock.prefill_worker.tokenize import PromptTokenizer
from sim.workload import load_demo_model


def refusal(request: Request) -> str:
    with pytest.raises(PromptTooLong) as refused:
        PromptTokenizer(load_demo_model()).tokenize_prompt(request)
    return str(refused.value)


def test_a_model_answers_to_its_served_name_and_to_its_directory() -> None:
    reader = PromptTokenizer(load_demo_model(), "psalms")
    for model in (None, "psalms", "demo"):
        assert reader.tokenize_prompt(Request(v=1, id="a", token_ids=[5], model=model)) == [5]
    with pytest.raises(UnknownModel, match="serves 'psalms', not 'other'"):
        reader.tokenize_prompt(Request(v=1, id="a", token_ids=[5], model="other"))


def test_a_text_that_would_fit_by_itself_is_counted() -> None:
    message = refusal(Request(v=1, id="a", prompt="In the beginning", sampling=Sampling(max_tokens=1024)))
    num_prompt = len(load_demo_model().tokenizer("In the beginning")["input_ids"])
    assert f"you requested {num_prompt + 1024} tokens ({num_prompt} in the prompt, 1024 for the answer)" in message


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_prompt_that_is_not_worth_counting_is_told_with_a_bound(field: str) -> None:
    text = "word " * 20_000
    prompt = {"prompt": text} if field == "prompt" else {"messages": [{"role": "user", "content": text}]}
    message = refusal(Request.model_validate({"v": 1, "id": "a", **prompt, "sampling": {"max_tokens": 160}}))
    assert "However, you requested at least " in message
    assert "160 for the answer" in message
    bound = int(message.partition("(at least ")[2].split()[0])
    assert 1024 < bound < len(load_demo_model().tokenizer(text)["input_ids"])
