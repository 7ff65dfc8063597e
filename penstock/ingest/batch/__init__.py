"""Batch files: the store they lie in, the batches, and who works them off."""
