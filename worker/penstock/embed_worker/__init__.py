"""Computes vectors and scores of texts."""
