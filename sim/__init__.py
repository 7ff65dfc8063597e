"""Servers, faults and models of the protocol, for tests and benchmarks."""
