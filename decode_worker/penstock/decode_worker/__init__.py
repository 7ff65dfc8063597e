"""Job reference → token stream, result. The loop is in worker.py."""
