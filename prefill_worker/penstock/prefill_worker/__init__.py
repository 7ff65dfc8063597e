"""Request → KV blocks, first token, job reference. The loop is in worker.py."""
