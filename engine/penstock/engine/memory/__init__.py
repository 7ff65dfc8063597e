"""KV blocks and recurrent states."""
