"""The parts of the sampler: `penstock.engine.sampler` puts them together."""
