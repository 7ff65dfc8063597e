"""The real worker in virtual time: threads, clocks, servers and mishaps follow from a seed."""
