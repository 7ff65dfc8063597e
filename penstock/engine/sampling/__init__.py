"""The parts of the sampler: `penstock/engine/sampler.py` puts them together."""
