"""Packed networks: layers for inference on a CPU, and the graphs in which they run."""
