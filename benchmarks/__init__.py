"""Benchmarks: `python -m benchmarks.NAME [--quick | --smoke] [--json FILE]` compares in one run, and prints ratios."""
