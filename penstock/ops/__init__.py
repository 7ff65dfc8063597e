"""What people who run a pipeline ask: lag, health, dead letters, access."""
