"""The subcommands of `fst analyze`: each adds its options and returns a `Document`."""
