"""Exceptions and dying words of plugins in one line, equal on every rank."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")
_OURS = str(Path(__file__).parent)
_FRAMES_BELOW = "(most recent call first):"
_CAUSES = 3
_MAX_CHARACTERS = 800
_FULL = ("can't allocate memory", " error: out of memory", "]: out of memory")
"""What RuntimeErrors say: torch's allocator of the host; torch of a driver; Triton of one."""


def one_line(text: str) -> str:
    """The text's lines joined by ``|``. Addresses differ from rank to rank, so they are blanked;
    control characters, which could write anywhere on a terminal, are escaped.
    """
    lines = (" ".join(line.split()) for line in _ADDRESS.sub("0x…", text).splitlines())
    joined = " | ".join(line for line in lines if line)
    joined = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)
    if len(joined) <= _MAX_CHARACTERS:
        return joined
    half = _MAX_CHARACTERS // 2
    return f"{joined[:half]} … {joined[-half:]}"


def describe(error: BaseException) -> str:
    """``Type: message (at file:line)``, and the same of each cause."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < _CAUSES:
        try:
            message = str(current)
        except Exception as nested:  # an exception may fail even at that
            message = f"its message can't be shown: {type(nested).__name__}"
        name = type(current).__qualname__
        parts.append(one_line((f"{name}: {message}" if message else name) + _place(current)))
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)
    return ", caused by ".join(parts)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's, torch's, or that of torch's allocator of
    the host or of a GPU's driver, which have no types of their own.
    """
    if isinstance(error, MemoryError):
        return True
    if any(cls.__name__ == "OutOfMemoryError" for cls in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(told in str(error) for told in _FULL)


def _place(error: BaseException) -> str:
    """Where a plugin raised it; empty if no code of a plugin ran."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<frozen ", _OURS)):
            return f" (at {frame.filename}:{frame.lineno})"
    return ""


def last_words(output: str) -> str:
    """The end of what a dead process printed, or the innermost frames of its stack dump."""
    lines = [line for line in output.splitlines() if line.strip()]
    dumps = [i for i, line in enumerate(lines) if line.rstrip().endswith(_FRAMES_BELOW)]
    if not dumps:
        return one_line("\n".join(lines[-5:]))
    # The thread that died is named "Current thread"; after a timeout the main thread comes last.
    current = [i for i in dumps if lines[i].startswith("Current thread 0x")]
    start = (current or dumps)[-1]
    cause = lines[max(dumps[0] - 2, 0) : dumps[0]]
    return one_line("\n".join([*cause, *lines[start + 1 : start + 4]]))
