"""Converted layers: what they remember, their decay, and the channels of a network."""
