"""How many workers the load needs now: `sizing` (formulas), `windows` (the load), `controller` (decisions)."""
