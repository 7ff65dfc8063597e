"""How many workers a load needs: `trace` (the load), `rates` (how fast a worker is), `plan`; `simulator`, `placing`."""
