"""Rules of pruning, strategies made of them, and the masks behind both."""
