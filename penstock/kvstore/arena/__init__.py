"""Memory that all workers of a host share: slots of one size in one file, and tables that say what is in them.

The tier uses `arena.py`. Its parts are `layout.py` (offsets in the file), `locks.py` and `guard.py` (locking),
`file.py` (names, opening, removing), `index.py`, `slots.py` and `leases.py` (the tables), `growth.py` (allocation of
the memory) and `check.py` (consistency checks).
"""
