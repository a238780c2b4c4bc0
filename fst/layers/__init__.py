"""Converted layers: a call, what they remember, and their share of the optimizer's step."""

from fst.layers import step as step  # registers the hooks around every optimizer's step
