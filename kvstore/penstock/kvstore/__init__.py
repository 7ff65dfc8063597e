"""KV blocks: their keys, their stored format, and the tiers that store them."""
