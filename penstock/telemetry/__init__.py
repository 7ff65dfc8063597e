"""Figures and traces for who runs a pipeline: meters, where they go, and what they say together."""
