"""Datasets, samplers and transforms."""
