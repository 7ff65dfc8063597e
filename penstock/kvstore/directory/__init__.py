"""A directory of blocks on disk: its lock and usage (`ledger.py`), its files, leases, writers and eviction."""
