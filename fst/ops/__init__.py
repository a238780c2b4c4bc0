"""The convolution op, its half-cost weight gradient, and the reference both are tested against."""
