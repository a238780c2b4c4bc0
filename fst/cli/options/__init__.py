"""The options of each command: argparse alone, so that --help imports nothing else."""
