"""Structured output: the grammar that an answer must match, and the tokens that may come next.

A grammar travels with its request and its job (`GrammarSpec` in `spec.py`), and is checked before it is published
(`checker.py`). A worker compiles it (`engine.py`) and keeps a `GrammarState` (`state.py`) beside the sequence. A
state is a function of the tokens alone: a worker that takes a request over gives it the tokens of the log, and gets the
same masks.

The order in which a token is chosen:

1. Log probabilities are the model's own, before anything else, as without a grammar: tokens that the grammar forbids
   are among the likeliest ones too. (vLLM takes them after its mask, before temperature and filters.)
2. `logit_bias`, then penalties change the scores.
3. The mask sets the scores of tokens that may not follow to minus infinity, so no bias brings one back, and one of
   the allowed tokens is chosen whatever its bias is.
4. Before `min_tokens` tokens, end-of-answer tokens are masked as well, unless nothing else may follow: the grammar
   wins.
5. Temperature, top-k, top-p and min-p apply to the allowed tokens, so top-k counts these; then the token is drawn.

How an answer ends:

- An end-of-answer token is allowed only where the grammar accepts. Where it must end (`is_ended`), the answer ends
  without another step, with `stop`, also at its last allowed token.
- `max_tokens` ends an answer anywhere, with `length`: the text is then the beginning of a valid one, and is not valid
  itself unless `is_accepting` was true.
- `stop` and `stop_token_ids` end an answer where they match, also inside of the grammar, but not within a call: one
  that has begun is written to its end, or to the limit. A token of `stop_token_ids` that the grammar does not allow
  is never chosen.
- `ignore_eos` with a grammar is refused: after the end of a grammar there is nothing to generate.
- With `n` above 1 each choice is a request of its own, with its own state; the choices share the compiled grammar.
"""
