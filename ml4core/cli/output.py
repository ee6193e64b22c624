"""Where words go: results to stdout, all else to stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PIPE_CLOSED = 128 + 13
"""Exit code when the reader of stdout has gone: what a shell shows for SIGPIPE."""

PLAIN_WIDTH = 200
"""Columns of a table in a file or pipe."""


def prepare_streams() -> None:
    """Characters that a stream's encoding lacks are escaped, in place of ending the run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def write(text: str) -> None:
    """A part of the results, at once. Ends the run quietly if nobody reads any more."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # what is still buffered must not fail at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None


def write_json(value: Any) -> None:
    write(json.dumps(value, indent=2, ensure_ascii=True, default=str) + "\n")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> str:
    """Rows of plain text in columns, as wide as the terminal, wider where there is none."""
    grid = Table(box=None, padding=(0, 2, 0, 0), show_header=any(columns))
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*(printable(cell) for cell in row))
    return _rendered(grid, stream)


def printable(text: str) -> str:
    """Text of others without control characters, which could write anywhere on a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


@contextmanager
def progress_bar(what: str) -> Iterator[Any]:
    """Gives a callable (done, all) in bytes that draws on stderr; None where it's no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Says on stderr that something goes on whose length isn't known, where that is a terminal."""
    console = Console(stderr=True)
    with console.status(Text(what)) if console.is_terminal else nullcontext():
        yield


def _rendered(grid: Table, stream: TextIO) -> str:
    terminal = stream.isatty()
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        force_terminal=terminal,
        width=None if terminal else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(grid)
    lines = buffer.getvalue().splitlines()
    return "".join(line.rstrip() + "\n" for line in lines)


def outline(value: Any, indent: int = 0) -> str:
    """JSON-able data as indented lines, for people."""
    pad = "  " * indent
    lines = []
    for key, part in value.items() if isinstance(value, dict) else (("-", part) for part in value):
        flat = _flat(part)
        label = pad + key if key == "-" else f"{pad}{key}:"
        lines.append(f"{label} {flat}" if flat else f"{label}\n{outline(part, indent + 1)}")
    return "\n".join(lines)


def _flat(part: Any) -> str:
    """A value, or plain ones together, on one line; empty if they are nested or long."""
    if not isinstance(part, dict | list | tuple):
        return "none" if part in (None, "") else printable(str(part))
    if not part:
        return "none"
    values = part.values() if isinstance(part, dict) else part
    if any(isinstance(value, dict | list | tuple) and value for value in values):
        return ""
    items = part.items() if isinstance(part, dict) else (("", value) for value in part)
    text = ", ".join(f"{key} {_flat(value)}".strip() for key, value in items)
    return text if len(text) <= PLAIN_WIDTH // 2 else ""
