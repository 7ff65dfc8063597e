"""Settings: where they come from, and what they mean for connections."""
