"""What only a GPU has: paged attention by torch's kernels, recorded decode steps, copies beside the computing."""
