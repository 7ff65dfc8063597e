"""Lag, health, dead letters and access, for the operators of a pipeline."""
