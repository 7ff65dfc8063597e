"""The base of the roles whose worker has a model of its own: prefill's and decode's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.engine.contract import InferenceEngine, Outcome, SampledToken
from penstock.engine.limits import check_prompt_logprobs, cut_max_tokens
from penstock.engine.sequence import Sequence as EngineSequence
from penstock.engine.text.detokenizer import Detokenizer
from penstock.engine.text.response_template import find_call_mark
from penstock.engine.text.token_text import TokenTexts, get_token_texts
from penstock.engine.vectors import TextReader, TextRequest
from penstock.errors import REFUSED_TEXTS, InvalidRequest
from penstock.grammar.state import GrammarState
from penstock.kvstore.block import PromptBlocks
from penstock.messages import EmbedOptions, Job, TokenEvent
from penstock.names import Pipeline
from penstock.worker.adapters import AdapterVersions
from penstock.worker.failure import is_suspect
from penstock.worker.grammars import GrammarCompiler
from penstock.worker.load import WorkerLoad
from penstock.worker.pictures import TaskPictures, find_pictures
from penstock.worker.task import Role, Task


class ModelRole(Role):
    """The engine of a role, and the events of the tokens that it samples."""

    writes_pieces = False
    engine: InferenceEngine

    def __init__(self, pipeline: Pipeline, engine: InferenceEngine, served_name: str = "") -> None:
        """`served_name` is the name by which callers ask for the model, if it is another than the engine's."""
        self.pipeline, self.engine, self.model_name = pipeline, engine, served_name or engine.model.name
        self.text_reader = _limit_texts(engine.model.text_reader, engine.limits.max_length)
        """Reads texts to compute vectors of, if the model does."""
        self.grammars = GrammarCompiler(engine.model)
        self.adapters = AdapterVersions(engine.model.adapters)
        self.pictures: TaskPictures | None = None
        """Reads pictures, if the model sees them here."""
        self._call_mark = find_call_mark(engine.model.response_template)

    def describe_model(self) -> dict[str, Any]:
        """Return what the heartbeat says of the model beside its name."""
        told = {
            "model_source": self.engine.model.name,
            "max_model_len": self.engine.limits.max_length,
            "response_template": self.engine.model.response_template,
        }
        if self.adapters.own:
            told["adapters"] = dict(self.adapters.own)
        if self.pictures is not None:
            rule = self.pictures.rule
            told |= {"sees": True, "picture_tokens": None if rule is None else rule.model_dump()}
        if (reader := self.text_reader) is not None:
            told |= reader.card.describe_card()
            told |= {} if reader.has_head else {"task": "embed", "max_model_len": reader.card.max_length}
        return told

    def set_default_prompt(self, name: str) -> None:
        """Let texts whose request names no prompt have this one, if it is not empty. Raises `ModelLoadError`."""
        if name and self.text_reader is not None:
            card = replace(self.text_reader.card, default_prompt=name)
            self.text_reader = replace(self.text_reader, card=card)

    @property
    def token_texts(self) -> TokenTexts:
        """The texts of the model's tokens."""
        return get_token_texts(self.engine.model.tokenizer)

    def add_to_engine(
        self, task: Task, seed: int, load: WorkerLoad, start: str = "", num_prompt_logprobs: int | None = None
    ) -> bool:
        """Have the engine go on with a request after all tokens so far; for a hand-off, compute the prompt and a token.

        `start` is what the output begins with (`Detokenizer`). Return False where the log's last token ends the answer;
        then the task has its `outcome`. Raise what `cut_max_tokens` and the engine's `add_request` raise.
        """
        message, model = task.message, self.engine.model
        assert message is not None
        self.adapters.check_task(task)
        sampling = message.sampling
        if sampling.fit_context:
            # A job was cut to the capacity of the worker that read the request. A smaller pool here cuts it once more.
            sampling = cut_max_tokens(sampling, len(task.token_ids), self.engine.limits.max_length)
            task.message = message.model_copy(update={"sampling": sampling})
        if sampling.prompt_logprobs is not None:
            check_prompt_logprobs(sampling, len(task.token_ids))
        task.blocks = self.hash_prompt(task)
        task.output = Detokenizer(model.tokenizer, sampling, model.eos_token_ids, sampling.max_tokens, start)
        logged = [] if task.hands_off else [event.token for event in task.log_events]
        grammar = None if task.grammar is None else GrammarState(task.grammar, token_ids=logged)
        if logged and _replay_answer(task, grammar, logged):
            return False
        seq = EngineSequence(
            task.id,
            task.token_ids,
            blocks=task.blocks,
            sampling=sampling,
            seed=seed,
            max_new_tokens=1 if task.hands_off else sampling.max_tokens,
            output_token_ids=logged,
            priority_class=task.priority_class,
            tenant=task.tenant,
            weight=message.weight,
            is_suspect=is_suspect(task.claim),
            grammar=grammar,
            num_prompt_logprobs=num_prompt_logprobs,
            pictures=task.pictures,
            adapter=task.adapter_digest,
            lease_owner=self.pipeline.lease_owner(task.id) if task.hands_off else "",
            was_handed_off=isinstance(message, Job),
            retain_s=message.retain_s or 0.0,
            since_s=task.delivery.timestamp_s,
            context=task,
        )
        self.engine.add_request(seq)
        task.seq = seq
        load.mean_prompt_tokens[task.priority_class].add(len(seq.token_ids))
        return True

    def hash_prompt(self, task: Task) -> PromptBlocks:
        """Return the names of the blocks of a request's prompt."""
        spans = [] if task.pictures is None else task.pictures.spans
        return self.engine.hash_prompt(task.tenant, task.token_ids, spans, task.adapter_digest)

    def read_job(self, task: Task, job: Job) -> None:
        """Read the pictures and the grammar of a job, if it has any. Raises `InvalidRequest`."""
        task.pictures = find_pictures(self.engine, job, self.pictures)
        if (grammar := job.sampling.grammar) is not None:
            task.grammar = self.grammars.compile_grammar(grammar)

    def read_texts(self, task: Task) -> TextRequest:
        """Return a request's texts, to be computed. Raises `InvalidRequest` where the model computes no vectors."""
        message = task.message
        assert message is not None
        if self.text_reader is None:
            raise InvalidRequest(REFUSED_TEXTS)
        options = message.embed or EmbedOptions()
        rows = self.text_reader.read_texts(message.texts or (), options)
        return TextRequest(task.id, rows, options, task.priority_class, task)

    def add_texts(self, task: Task, texts: TextRequest, load: WorkerLoad) -> None:
        """Have the engine compute texts that were read."""
        weight = 1.0 if task.message is None else task.message.weight
        self.engine.add_texts(texts, task.tenant, weight, is_suspect=is_suspect(task.claim))
        load.mean_prompt_tokens[task.priority_class].add(texts.num_prompt_tokens)

    def finish_answer(self, task: Task) -> bool:
        """Have the last blocks of a request stored whose answer has ended. Return whether there are any.

        Where it ends in a call of a tool, its blocks outlive others for a while: the call's result comes with the next
        prompt.
        """
        is_storing = self.engine.finish_request(task.id, ends_in_call=self._ends_in_call(task)) is not None
        if task.seq is not None and task.seq.num_retained_blocks:
            task.span.set_attribute("retained_blocks", task.seq.num_retained_blocks)
        return is_storing

    def _ends_in_call(self, task: Task) -> bool:
        """Return whether an answer calls a tool. Only answers that are parsed have the marks of calls in their text."""
        if self._call_mark is None or task.message is None or not task.message.sampling.special_text:
            return False
        text = "".join(event.text for event in task.log_events)
        return task.finish_reason == "stop" and self._call_mark.search(text) is not None

    def report_rates(self, load: WorkerLoad) -> dict[str, object]:
        """Return how fast prompts are computed and answers decoded, for the heartbeat."""
        speed = self.engine.report_speed()
        return {
            "speed": None if speed is None else speed.as_json(),
            "prompt_tokens_per_s": self.engine.prefill_tokens_per_s(),
            "output_tokens_per_s": load.throughput.tokens_per_s,
        }

    def make_event(self, task: Task, item: SampledToken) -> TokenEvent | None:
        """Return the log event of a request's next token, and set the task's `outcome` where it is the last."""
        assert task.output is not None
        text, reason = task.output.add_token(item.token_id, is_grammar_ended=item.is_grammar_ended)
        if reason is not None:
            task.outcome = Outcome(reason)
        before = task.log_events[-1] if task.is_in_flight else None  # a token of the same step
        logprobs = item.logprobs
        if logprobs is not None:
            logprobs = self.token_texts.add_texts(logprobs, item.token_id)
        event = task.claim.next_event(item.token_id, text, logprobs, before)
        if task.adapter is not None and not task.log_events:
            return event.model_copy(update={"adapter": task.adapter_digest})
        return event


def _limit_texts(reader: TextReader | None, max_length: int) -> TextReader | None:
    """Return the reader of a model whose texts have to fit the engine, too."""
    if reader is None:
        return None
    return replace(reader, card=replace(reader.card, max_length=min(reader.card.max_length, max_length)))


def _replay_answer(task: Task, grammar: GrammarState | None, logged: Sequence[int]) -> bool:
    """Give a task's output the tokens in its log. Return whether the last one ends the answer; then the task has its
    `outcome`.
    """
    assert task.output is not None
    for index, token in enumerate(logged):
        ends = grammar is not None and index == len(logged) - 1 and grammar.is_ended
        _, reason = task.output.add_token(token, is_grammar_ended=ends)
        task.outcome = None if reason is None else Outcome(reason)
    return task.outcome is not None
