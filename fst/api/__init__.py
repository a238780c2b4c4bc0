"""The public functions: one file each, of the function's name."""
