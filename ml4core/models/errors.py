"""The error of everything that reads or writes model files, and how its messages show values."""

from __future__ import annotations

from collections.abc import Collection


class CheckpointError(ValueError):
    """A model folder or file that can't be used as it is.

    The message names the file and the tensor or key, the value found, and what would work.
    """


def shown(value: object, limit: int = 96) -> str:
    """`repr` of a value out of a file, cut at `limit` characters: printable whatever it holds."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, or nested too deep
        return f"a value of type {type(value).__name__} too long to print"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def listed(values: Collection[object], limit: int = 8) -> str:
    """The first `limit` values in order, and how many more there are."""
    first = [shown(value) for value, _ in zip(values, range(limit), strict=False)]
    rest = len(values) - len(first)
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


def os_reason(error: OSError) -> str:
    """The system's reason, with the number's text only: the path is named by the caller."""
    return error.strerror or type(error).__name__
