"""Which axes of a model's tensors hold the same channels, and the removal of channels."""
