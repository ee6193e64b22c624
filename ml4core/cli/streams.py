"""The standard streams: what was closed, what can't be encoded, and who writes to stdout."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_STANDARD = (
    ("stdin", "r", os.O_RDONLY),
    ("stdout", "w", os.O_RDONLY),
    ("stderr", "w", os.O_WRONLY),
)


def prepare() -> None:
    """Makes the streams safe to use.

    A stream that was closed is opened on nothing, so that no file takes its number; stdout such
    that writing fails, as results must not get lost in silence. Characters that a stream's
    encoding lacks are escaped, in place of ending the run.
    """
    for number, (name, mode, flags) in enumerate(_STANDARD):
        if getattr(sys, name) is None:
            _occupy(number, flags)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def results() -> TextIO:
    """Where results go."""
    return getattr(sys.stdout, "results", sys.stdout)


def settle() -> None:
    """What is still buffered goes out now, or never: at exit it would fail with a traceback."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        silence(sys.stdout)


def silence(stream: TextIO) -> None:
    """What is still buffered goes nowhere."""
    with suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


@contextmanager
def results_apart() -> Iterator[None]:
    """Meanwhile whatever writes to stdout, but for ``results``, finds stderr there: what a plugin
    or its libraries print is no result.
    """
    stdout = sys.stdout
    stdout.flush()
    try:
        number, errors = stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):  # a stand-in without a file
        sys.stdout = _Apart(stdout)
        try:
            yield
        finally:
            sys.stdout = stdout
        return
    kept = os.dup(number)
    own = os.fdopen(kept, "w", encoding=stdout.encoding, errors=stdout.errors, closefd=False)
    os.dup2(errors, number)
    sys.stdout = _Apart(own)
    try:
        yield
    finally:
        sys.stdout = stdout
        with suppress(OSError):
            stdout.flush()
        os.dup2(kept, number)
        with suppress(OSError):
            own.close()
        os.close(kept)


class _Apart(io.TextIOBase):
    """Stands for stdout and writes to stderr."""

    def __init__(self, results: TextIO) -> None:
        self.results = results

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stderr.encoding

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def fileno(self) -> int:
        return sys.stderr.fileno()

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    @property
    def buffer(self) -> Any:
        return sys.stderr.buffer


def _occupy(number: int, flags: int) -> None:
    with suppress(OSError):
        os.fstat(number)
        return
    opened = os.open(os.devnull, flags)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
