"""Two regions in virtual time: `eu`, which dies, and `us`, which has a copy of it and adopts it."""
