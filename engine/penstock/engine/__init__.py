"""The model: loading, paged KV pool, batches, attention, sampling, text. Both workers run on it."""
