"""What is pruned: rules, strategies made of them, and the masks behind both."""
