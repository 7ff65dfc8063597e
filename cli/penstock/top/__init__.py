"""`penstock top`: the live view of a pipeline in a terminal."""
