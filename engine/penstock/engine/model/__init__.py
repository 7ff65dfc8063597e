"""A model whose layers the kernels compute."""
