"""Benchmarks, analyses, ablations and reports: they look at training, nothing trains with them."""
