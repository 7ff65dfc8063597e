"""One step through a model of transformers."""
