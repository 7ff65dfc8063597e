"""One poisonous request ends itself, typed, whatever reading it does to a worker, and the good ones are answered."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.config.settings import RecordSettings
from penstock.engine.loading.description import load_tokenizer
from penstock.engine.text.marked_text import MarkedText, strip_marks
from penstock.engine.text.template_process import TakesTime, Template, TemplateProcess
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import InternalError, ModelLoadError
from penstock.messages import Request, Sampling
from penstock.prefill_worker.tokenize import PromptTokenizer
from sim.chaos.poison import ENDLESS, MEMORY, PANIC, POISON, TEMPLATE, make_poisoned_model
from sim.line import InProcessPipeline, core_of
from sim.waiting import wait_for
from sim.workload import compute_answers

UNINTERRUPTED = "{{ ('a' * 30000000) | wordwrap(1) | length }}"
GOOD = Sampling(max_tokens=3, temperature=0, ignore_eos=True)


def ask(name: str, **prompt: Any) -> Request:
    return Request(id=name, sampling=GOOD, **prompt)


def ask_chat(text: str) -> Request:
    return ask(text, messages=[{"role": "user", "content": text}])


class Killed(BaseException):
    """What ends a process."""


class PanickingTokenizer:
    """The demo model's tokenizer, and for `PANIC` one whose pattern runs away in Rust."""

    def __init__(self, tokenizer: Any) -> None:
        self._real, self._panicking = tokenizer, AutoTokenizer.from_pretrained(make_poisoned_model())
        self.chat_template = TEMPLATE

    def get_chat_template(self, *_: object) -> str:
        return self.chat_template

    def __call__(self, text: str, **how: Any) -> Any:
        return (self._panicking if text == PANIC else self._real)(text, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.mark.parametrize("bus", ["embedded", "kafka"])
def test_a_poisonous_request_among_good_ones_ends_itself(
    make_line: Callable[..., InProcessPipeline], bus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = make_line(bus=bus, record=RecordSettings(retry_first_s=0.01, retry_cap_s=0.02))
    tokenizer = PanickingTokenizer(core_of(line.prefill).model.tokenizer)
    monkeypatch.setattr(vars(line.prompt_tokenizer)["_chats"], "_tokenizer", tokenizer)
    good = [ask(f"good-{number}", prompt="In the beginning") for number in range(6)]
    line.send_requests(*good[:3], ask("panic", prompt=PANIC), ask_chat("endless"), ask_chat("memory"), *good[3:])
    results = {one.id: one for one in line.run_until_results(len(good) + len(POISON))}
    assert {name: one.error.code for name, one in results.items() if one.error is not None} == POISON
    expected = compute_answers(good)
    assert {name: results[name].token_ids for name in expected} == {n: a.token_ids for n, a in expected.items()}
    assert "more than 0.25 s of processor time" in str(results["endless"].error), "also as a worker's first chat"
    assert "MiB of memory" in str(results["memory"].error)


def test_what_ends_its_worker_while_it_is_read_is_given_up_after_its_attempts(
    make_line: Callable[..., InProcessPipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, killed = make_line(record=RecordSettings(lease_s=0.4, max_attempts=3)), list[str]()
    read = PromptTokenizer.tokenize_prompt

    def kill(self: PromptTokenizer, request: Request, **how: Any) -> list[int]:
        if request.id == "bad":
            killed.append(request.id)
            raise Killed
        return read(self, request, **how)

    monkeypatch.setattr(PromptTokenizer, "tokenize_prompt", kill)
    good = ask("good", prompt="In the beginning")
    line.send_requests(good, ask("bad", prompt="In the beginning"))
    dead = []

    def are_answered() -> bool:
        try:
            line.prefill.run_once()
        except Killed:
            line.prefill.session.stop()
            dead.append(line.prefill)
            line.add_prefill(f"prefill-{len(dead)}")
        line.decode.run_once()
        return len(line.read_results()) == 2

    wait_for(are_answered, "both are answered", 0)
    results = {one.id: one for one in line.read_results()}
    assert results["good"].token_ids == compute_answers([good])["good"].token_ids
    assert results["bad"].error is not None
    assert results["bad"].error.code == "attempts_exhausted"
    assert len(killed) == 3, "as many as a claim has"
    for one in dead:
        one.close()


def test_a_caller_that_may_not_wait_is_told_so_and_finds_the_answer_later() -> None:
    process = TemplateProcess()
    source = "{% if name == 'slow' %}" + ENDLESS + "{% endif %}{{ name }}"

    def render(name: str, source: str = "{{ name }}", **how: bool) -> str:
        chat = {"messages": [], "variables": {"name": name}, "own": {}}
        found = process.render(Template(source, "(?!)"), chat, **how)
        return strip_marks(MarkedText(found["text"], found["mark"])) if "text" in found else next(iter(found))

    try:
        with pytest.raises(TakesTime):
            render("quick", may_wait=False)  # it starts
        assert render("quick") == "quick"
        wait_for(lambda: render("quick", may_wait=False) == "quick", "it is quick")
        assert render("quick", source) == "quick"
        with pytest.raises(TakesTime):
            render("slow", source, may_wait=False)
        with pytest.raises(TakesTime):
            render("quick", source, may_wait=False)
        assert render("quick", source) == "quick", "behind the other"
        assert render("slow", "{{ name }}") == "slow", "by another template"
        assert render("slow", source, may_wait=False) == "over", "its answer is kept"
        assert process._process is not None
        process._process.kill()
        with pytest.raises(InternalError):
            render("quick", source)
        assert render("quick", source) == "quick", "another process"
    finally:
        process.close()


@pytest.mark.parametrize("template", [ENDLESS, MEMORY, UNINTERRUPTED])
def test_a_template_that_exceeds_its_limits_is_refused_when_its_model_is_loaded(tmp_path: Path, template: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelLoadError, match=f"the chat template in {tmp_path} takes too much for one short message"):
        load_tokenizer(tmp_path)


def test_a_template_in_one_long_operation_is_over_its_time_and_another_child_goes_on() -> None:
    long = "{% set n = messages|length + 1 %}"
    long += "{% set a, b = [n] * 999999, [n] * 999998 + [0] %}{{ ([a] * 99999).count(b) }}"
    process = TemplateProcess()
    chat: dict[str, Any] = {"messages": [], "variables": {}, "own": {}}
    try:
        assert "in one operation" in process.render(Template(long, "(?!)"), chat)["over"]
        assert "text" in process.render(Template("{{ 1 }}", "(?!)"), chat)
    finally:
        process.close()
