"""The axes of a model's tensors that hold the same channels."""
