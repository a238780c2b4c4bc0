"""Text, machine and arguments: what every package may use, and what uses nothing of fst."""
