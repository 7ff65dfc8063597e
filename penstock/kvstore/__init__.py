"""KV blocks: their keys, their stored form, the tiers they are in."""
