"""The ``ml4`` command: thin commands, no logic of their own."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    try:
        from ml4core.cli.app import main as run  # takes long enough to be interrupted
    except KeyboardInterrupt:
        return 130
    return run(argv)
