"""From a request's log to its one result."""

from collections.abc import Iterable

from penstock import names
from penstock.bus.contract import Outgoing
from penstock.messages import EndEvent, Job, Result, TokenEvent
from penstock.names import Pipeline


def result_of(job: Job, model: str, log: Iterable[TokenEvent | EndEvent]) -> Result | None:
    """The result that a finished log stands for; None when the log has no end."""
    token_ids, texts, logprobs = [], [], []
    for event in log:
        texts.append(event.text)
        if isinstance(event, TokenEvent):
            token_ids.append(event.token)
            if event.logprobs is not None:
                logprobs.append(event.logprobs)
        else:
            return Result(
                id=job.id,
                tenant=job.tenant,
                klass=job.klass,
                model=model,
                finish_reason=event.finish_reason,
                text="".join(texts),
                token_ids=token_ids,
                logprobs=None if job.sampling.logprobs is None else logprobs,
                usage=event.usage,
                timings=event.timings,
                error=event.error,
            )
    return None


def outgoing_result(pipeline: Pipeline, result: Result, trace_headers: dict[str, str]) -> Outgoing:
    """The message for the results topic."""
    headers = {names.VERSION: str(result.v), names.TENANT: result.tenant, names.CLASS: result.klass}
    return Outgoing(pipeline.results, result.encode(), key=result.id, headers=headers | trace_headers)
