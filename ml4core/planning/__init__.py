"""What fits: weights, caches and tokens of a deployment, with no device."""
