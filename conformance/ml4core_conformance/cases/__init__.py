"""Inputs of the checks of ops, as data."""
