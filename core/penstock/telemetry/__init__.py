"""Metrics and traces for the operators of a pipeline: how they are counted, exported and summed up."""
