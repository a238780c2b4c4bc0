"""Text, machine and arguments: what every room may use, and what uses nothing of fst."""
