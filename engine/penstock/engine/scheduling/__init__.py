"""Which sequences are computed next."""
