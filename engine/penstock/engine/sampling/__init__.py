"""The parts of the sampler: `penstock.engine.sampling.sampler` puts them together."""
