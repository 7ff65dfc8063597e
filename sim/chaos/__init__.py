"""Real processes that are killed, clients that read every stream, and a checker that compares both to promises."""
