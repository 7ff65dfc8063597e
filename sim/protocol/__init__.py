"""The protocol as an explicit-state model, explored and replayed against the real scripts."""
