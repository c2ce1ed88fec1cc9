"""Benchmarks: figures of one run, with a peer beside them."""
