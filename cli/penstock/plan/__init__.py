"""The number of workers for a load: `trace`, `recording` (the load), `rates` (a worker's speed), `plan`, `goodput`;
`simulator`, `placing`, `coarse`.
"""
