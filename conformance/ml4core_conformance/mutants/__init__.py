"""Backends that are wrong in one way each: what the suite must catch."""
