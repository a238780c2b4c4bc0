"""Weights in files of every kind, and the note of which of them must be N:M."""
