"""Servers that demand TLS, users and rights."""
