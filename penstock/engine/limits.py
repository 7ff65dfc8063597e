"""What an engine can never run, whatever comes and goes."""

from penstock.engine.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.errors import InternalError, InvalidRequest, PromptTooLong
from penstock.messages import Sampling


def check_sequence(seq: Sequence, model: LoadedModel, num_blocks: int, max_new: int = 0) -> None:
    """Raise `PromptTooLong` for what fits neither context nor pool (`num_blocks` blocks), `InvalidRequest` for unknown
    token ids, `InternalError` for a tail that is none. `max_new`: new tokens, if they are more than it says itself.
    """
    max_new, layout = max(max_new, seq.max_new), model.layout
    length = seq.num_prompt + max_new
    if length > model.context_length:
        raise PromptTooLong(context_exceeded(model.context_length, seq.num_prompt, max_new))
    needed = -(-(length - 1) // layout.block_size)
    if needed > num_blocks:
        said = context_exceeded(max_length(model, num_blocks), seq.num_prompt, max_new)
        raise PromptTooLong(f"{said} The pool of KV blocks holds no more (PENSTOCK_ENGINE_POOL_MB).")
    if min(seq.token_ids) < 0 or max(seq.token_ids) >= model.vocab_size:
        raise InvalidRequest(f"token ids must be between 0 and {model.vocab_size - 1}")
    if max(seq.sampling.logit_bias, default=0) >= model.vocab_size:
        raise InvalidRequest(f"logit_bias: the vocabulary has {model.vocab_size:,} tokens")
    if seq.tail is not None and memoryview(seq.tail).nbytes != layout.block_bytes:
        raise InternalError(f"{seq.id}: its tail has not {layout.block_bytes} bytes")
    if seq.tail is not None and seq.num_prompt % layout.block_size == 0:
        raise InternalError(f"{seq.id}: it has a tail, and its prompt ends with a full block")


def max_length(model: LoadedModel, num_blocks: int) -> int:
    """Return how many tokens prompt and answer may have together: the last one needs no place in the pool."""
    return min(model.context_length, num_blocks * model.layout.block_size + 1)


def cut_max_tokens(sampling: Sampling, num_prompt: int, most: int) -> Sampling:
    """Return the sampling with `max_tokens` cut to what `most` tokens leave after the prompt, where it asks for that.

    One new token stays in any case: a prompt that has no room even for that is for `check_sequence` to refuse.
    """
    if not sampling.fit_context:
        return sampling
    return sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, max(1, most - num_prompt))})


def context_exceeded(context: int, num_prompt: int, max_tokens: int, bound: str = "") -> str:
    """Say that prompt and answer do not fit, with the beginning by which clients of OpenAI's API know this error."""
    asked = f"{bound}{num_prompt + max_tokens} tokens ({bound}{num_prompt} in the prompt, {max_tokens} for the answer)"
    return (
        f"This model's maximum context length is {context} tokens. However, you requested {asked}. "
        "Shorten the prompt, or ask for a shorter answer."
    )
