"""Weights, caches and rows that stay on devices between steps."""
