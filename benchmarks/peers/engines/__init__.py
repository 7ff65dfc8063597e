"""One file an engine. Each has `prepare(model)`, the directory or file it loads, and `load(…)`, an object with `run`.

`run(requests, on_step, temperature)` submits all requests at once and calls `on_step` after each step, with the indices
of those that got a token; it returns each request's new tokens. Temperature 0 is greedy.
"""
