"""A directory of blocks on disk: who may have how much of it (`ledger.py`), what is in it, and what keeps it there."""
