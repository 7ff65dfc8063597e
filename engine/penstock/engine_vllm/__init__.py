"""vLLM as the core of an engine. Needs vLLM, which no other part of the package imports."""
