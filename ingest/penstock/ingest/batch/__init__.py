"""Batches: the store of files and batches, and the runner that answers their rows."""
