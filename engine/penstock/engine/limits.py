"""Limits of context length and pool: which sequences the engine can never run."""

from penstock.engine.contract import ModelCard
from penstock.engine.sequence import Sequence
from penstock.errors import InternalError, InvalidRequest, PromptTooLong
from penstock.kvstore.store import PoolLayout
from penstock.messages import MAX_LOGPROBS, Sampling


def check_sequence(
    seq: Sequence, model: ModelCard, layout: PoolLayout, num_blocks: int, max_new_tokens: int = 0
) -> None:
    """Raise if the engine can never run the sequence.

    `PromptTooLong` if it exceeds the context or the pool (`num_blocks` blocks), `InvalidRequest` for unknown token ids,
    `InternalError` for a wrong tail payload. `max_new_tokens` replaces the sequence's own limit if it is higher.
    """
    max_new_tokens = max(max_new_tokens, seq.max_new_tokens)
    length = seq.num_prompt_tokens + max_new_tokens
    if length - seq.is_pooled > model.context_length:  # behind a vector there is no token
        raise PromptTooLong(context_exceeded(model.context_length, seq.num_prompt_tokens, max_new_tokens))
    needed = -(-(length - 1) // layout.block_size)
    if needed > num_blocks:
        said = context_exceeded(max_length(model, layout, num_blocks), seq.num_prompt_tokens, max_new_tokens)
        raise PromptTooLong(f"{said} The pool of KV blocks holds no more (PENSTOCK_ENGINE_POOL_MB).")
    if min(seq.token_ids) < 0 or max(seq.token_ids) >= model.vocab_size:
        raise InvalidRequest(f"token ids must be between 0 and {model.vocab_size - 1}")
    if max(seq.sampling.logit_bias, default=0) >= model.vocab_size:
        raise InvalidRequest(f"logit_bias: the vocabulary has {model.vocab_size:,} tokens")
    if seq.tail_payload is not None and memoryview(seq.tail_payload).nbytes != layout.block_bytes:
        raise InternalError(f"{seq.id}: its tail payload must have {layout.block_bytes} bytes")
    if seq.tail_payload is not None and seq.num_prompt_tokens % layout.block_size == 0:
        raise InternalError(f"{seq.id}: it has a tail payload, but its prompt ends with a full block")


def check_prompt_logprobs(sampling: Sampling, num_prompt_tokens: int) -> None:
    """Raise `InvalidRequest` if a request asks for more log probabilities of prompt and answer than a result holds."""
    if sampling.prompt_logprobs is None:
        return
    num_answer = 0 if sampling.logprobs is None else sampling.max_tokens * (1 + sampling.logprobs)
    num_prompt = num_prompt_tokens * (1 + sampling.prompt_logprobs)
    if num_prompt + num_answer > MAX_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs: {num_prompt_tokens:,} prompt tokens and what the answer may have make "
            f"{num_prompt + num_answer:,} log probabilities; there may be {MAX_LOGPROBS:,}. Ask for fewer of the "
            "likeliest tokens, or shorten the prompt."
        )


def max_length(model: ModelCard, layout: PoolLayout, num_blocks: int) -> int:
    """Return how many tokens prompt and answer may have together. The last token needs no KV in the pool."""
    return min(model.context_length, num_blocks * layout.block_size + 1)


def cut_max_tokens(sampling: Sampling, num_prompt_tokens: int, max_length: int) -> Sampling:
    """Return the sampling of a request that may fill the context (`fit_context`), with `max_tokens` cut so that prompt
    and answer fit `max_length` tokens.

    At least one new token remains: `check_sequence` refuses a prompt that leaves no room even for that.
    """
    max_tokens = min(sampling.max_tokens, max(1, max_length - num_prompt_tokens))
    # The cut sampling travels in the job, where `min_tokens` above `max_tokens` is refused.
    min_tokens = None if sampling.min_tokens is None else min(sampling.min_tokens, max_tokens)
    return sampling.model_copy(update={"max_tokens": max_tokens, "min_tokens": min_tokens})


def context_exceeded(context: int, num_prompt_tokens: int, max_tokens: int, bound: str = "") -> str:
    """Return the error message for a prompt and answer that exceed the context.

    It begins as OpenAI's message does, because clients recognize the error by that.
    """
    parts = f"{bound}{num_prompt_tokens} in the prompt, {max_tokens} for the answer"
    asked = f"{bound}{num_prompt_tokens + max_tokens} tokens ({parts})"
    return (
        f"This model's maximum context length is {context} tokens. However, you requested {asked}. "
        "Shorten the prompt, or ask for a shorter answer."
    )
