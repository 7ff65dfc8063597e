"""Blocks that all workers of a host share: slots of one size, in memory or on disk, and tables of their content.

The tier uses `arena.py`. Its parts are `layout.py` (offsets in the files), `locks.py` and `guard.py` (locking),
`file.py` (files in shared memory), `directory.py` (files on disk), `medium.py` (slots), `index.py`, `slots.py` and
`leases.py` (the tables), `growth.py` (allocation) and `check.py` (consistency checks).
"""
