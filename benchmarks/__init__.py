"""Benchmarks: each is python -m benchmarks.NAME [--quick] [--json FILE], compares in one run, and prints ratios."""
