"""The loop of a worker (`worker.py`) and its parts. Import each from its own module."""
