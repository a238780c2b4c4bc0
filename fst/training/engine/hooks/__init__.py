"""Hooks: sparsity, crash-safe checkpoints, losses, random states."""
