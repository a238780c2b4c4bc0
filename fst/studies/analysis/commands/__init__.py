"""The subcommands of tools/analyze.py: each adds its options and returns a `Result`."""
