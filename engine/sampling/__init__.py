"""The parts of the sampler: `engine/sampler.py` puts them together."""
