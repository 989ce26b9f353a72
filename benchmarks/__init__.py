"""Benchmarks: the library beside its peers, in one run."""
