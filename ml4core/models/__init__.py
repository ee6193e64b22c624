"""The ML4 models in terms of ops, and the reading of their checkpoints."""
