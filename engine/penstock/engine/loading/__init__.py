"""Opens a model and proves it."""
