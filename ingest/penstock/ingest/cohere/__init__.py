"""Cohere's endpoints for vectors and for ranking, and vLLM's for scores, as data. No I/O."""
