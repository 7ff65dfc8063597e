"""Excludes the objects that a process has loaded before it serves from garbage collections."""

import atexit
import gc


def freeze_loaded_objects() -> None:
    """Leave all objects that there are now out of later collections, until the process ends.

    The libraries of models are half a million objects. A collection that looks at all of them takes 0.2 s, in which no
    stream of the process gets a token, and a worker has one every 30,000 tokens.
    """
    gc.collect()  # what loading left in circles would stay
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries call what the interpreter's last collection leaves a leak, on stderr
