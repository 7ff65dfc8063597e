"""The embedded stack: servers and worker processes on this machine."""
