"""How many workers a load needs: `trace`, `recording` (the load), `rates` (how fast a worker is), `plan`, `goodput`;
`simulator`, `placing`, `coarse`.
"""
