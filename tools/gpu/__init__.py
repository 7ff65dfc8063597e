"""What brings vLLM behind this pipeline to a GPU machine that has no network."""
