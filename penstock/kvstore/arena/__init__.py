"""Memory that all workers of a host share: slots of one size in one file, and the tables that say what is in them.

`arena.py` is what a tier uses. The others are its parts: `layout.py` (where what lies in the file), `locks.py`,
`file.py` (names, opening, removing), `index.py` and `slots.py` and `leases.py` (the tables), `growth.py` (the memory,
piece by piece) and `check.py` (whether all that agrees).
"""
