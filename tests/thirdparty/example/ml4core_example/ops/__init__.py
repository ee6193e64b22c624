"""Ops of our own, each with the contract of ``ml4core.api.OPS``."""
