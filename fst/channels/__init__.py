"""Tensors that share a channel dimension, and the search for its best order."""
