"""The ``ml4`` command: thin commands, no logic of their own."""

from ml4core.cli.app import main

__all__ = ["main"]
