"""One way to speak Redis: clients with time limits, addresses, Sentinels, several servers."""
