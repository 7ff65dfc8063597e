"""Other engines on the same weights, each in its own environment and process, asked in turns."""
