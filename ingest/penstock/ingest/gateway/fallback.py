"""Whether endpoints answer a request in place of the own workers, decided before anything of it is written.

Two pipelines serve one name: one by workers of its own, the other by workers that ask endpoints. The request of a
tenant that allows it (`penstock keys tenant NAME --fallback`) goes to the second one if the first has no worker that is
ready, or would begin later than `PENSTOCK_SLO_INTERACTIVE_TTFT_S`, and the second one is in time. If neither is, it
waits in the first. Its record, topic and stream are those of the one pipeline that was chosen, so it is never run by
both, and a POST that joins it by `Idempotency-Key` stays with that pipeline.
"""

from collections.abc import Sequence

from penstock.ingest.gateway.state import Gateway
from penstock.ingest.models import ServedModel
from penstock.ingest.openai.endpoint import StreamMeta, SubmitArgs
from penstock.ingest.tenants import Caller
from penstock.names import Pipeline
from penstock.ops.lag import PipelineLag

PIPELINE_HEADER = "x-penstock-pipeline"
"""The header that tells a tenant with a fallback which pipeline answers."""
OWN_FIELDS = ("texts", "token_ids", "logit_bias", "stop_token_ids")
"""Fields of requests that endpoints refuse, or that number the tokens of the own model; beside log probabilities."""


async def choose_pipeline(
    gateway: Gateway,
    caller: Caller,
    served: ServedModel,
    submit_args: Sequence[SubmitArgs],
    earlier: StreamMeta | None,
    *,
    has_pictures: bool,
) -> ServedModel:
    """Return the model at the pipeline that answers: `served`, or its fallback. `earlier` is the request to join."""
    if earlier is not None:
        return gateway.models.find_at(served.name, earlier.pipeline) or served
    fallback = gateway.models.find_fallback(served.name) if caller.fallback else None
    if fallback is None or has_pictures or not all(map(_suits_endpoint, submit_args)):
        return served
    limit_s = gateway.settings.slo.interactive_ttft_s
    own = await gateway.admission.lag_cache.get_lag(Pipeline(served.pipeline))
    if own is None or _is_in_time(own, limit_s):
        return served
    other = await gateway.admission.lag_cache.get_lag(Pipeline(fallback.pipeline))
    return fallback if other is not None and _is_in_time(other, limit_s) else served


def _suits_endpoint(args: SubmitArgs) -> bool:
    """Return whether a request is interactive, and an endpoint takes all of it."""
    # Log probabilities with the most likely tokens beside them or, where it is 0, alone.
    wants_logprobs = args.get("logprobs") is not None and "messages" not in args
    wants_logprobs = wants_logprobs or args.get("prompt_logprobs") is not None
    is_own = wants_logprobs or any(args.get(name) for name in OWN_FIELDS)
    return not is_own and args.get("priority_class", "interactive") == "interactive"


def _is_in_time(lag: PipelineLag, limit_s: float) -> bool:
    """Return whether a pipeline has workers that are ready, and is not known to begin late."""
    wait_s = lag.waits["interactive"]
    return lag.is_served and (wait_s is None or wait_s <= limit_s)
