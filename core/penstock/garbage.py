"""Excludes the objects that a process has loaded before it serves from garbage collections."""

import atexit
import gc


def freeze_loaded_objects() -> None:
    """Exclude all present objects from later collections, until the process ends.

    The libraries of models are half a million objects. A collection that looks at all of them takes 0.2 s, in which no
    stream of the process gets a token, and a worker has one every 30,000 tokens.
    """
    gc.collect()  # cycles that loading left would stay for good
    gc.freeze()
    atexit.register(gc.unfreeze)  # else libraries report leaks on stderr when the interpreter ends
