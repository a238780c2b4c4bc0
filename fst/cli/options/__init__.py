"""What each command takes: argparse alone, so that --help needs none of what the commands use."""
