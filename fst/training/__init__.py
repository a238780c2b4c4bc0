"""Training from configs: `engine` around MMEngine's Runner, `detection` for MMDetection."""
