"""Where words go: results to stdout, all else to stderr."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ml4core.cli import streams

PIPE_CLOSED = 128 + 13
"""Exit code when the reader of stdout has gone: what a shell shows for SIGPIPE."""

PLAIN_WIDTH = 200
"""Columns of a table in a file or pipe."""
LEGIBLE = 12
"""Columns of a terminal below which a table's column is hard to read."""


def write(text: str) -> None:
    """A part of the results, at once. Ends the run quietly if nobody reads any more."""
    stream = streams.results()
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        streams.silence(stream)
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(PIPE_CLOSED) from None
        raise OSError(error.errno, error.strerror, "stdout") from error


def write_json(value: Any) -> None:
    write(json.dumps(value, indent=2, ensure_ascii=True, default=str) + "\n")


def note(text: str, *, rendered: bool = False) -> None:
    """A line on stderr; ``rendered`` text has been through ``table`` or ``outline``."""
    print(text if rendered else printable(text), file=sys.stderr, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> str:
    """Rows of plain text in columns, as wide as the terminal, wider where there is none. On a
    terminal too narrow for them, each cell has lines of its own.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    buffer = io.StringIO()
    terminal = stream.isatty()
    console = Console(
        file=buffer,
        force_terminal=terminal,
        width=None if terminal else PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
    if terminal and _least_width([columns, *cells]) > console.width:
        return _stacked(columns, cells)
    grid = Table(box=None, padding=(0, 2, 0, 0), show_header=any(columns))
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in cells:
        grid.add_row(*row)
    console.print(grid)
    lines = buffer.getvalue().splitlines()
    return "".join(line.rstrip() + "\n" for line in lines)


def _least_width(rows: Sequence[Sequence[str]]) -> int:
    """Columns that a table takes if no cell is folded below ``LEGIBLE`` columns."""
    widths = [
        max(len(line) for cell in column for line in cell.split("\n"))
        for column in zip(*rows, strict=True)
    ]
    return sum(min(width, LEGIBLE) + 2 for width in widths)


def _stacked(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A block for each row: its first cell, then the others below it, those that hold anything."""
    blocks = []
    for row in rows:
        named = [
            (f"{column}: " * bool(column), cell) for column, cell in zip(columns, row, strict=True)
        ]
        first, *rest = (head + cell for head, cell in named if cell)
        lines = [first, *(f"  {line}".replace("\n", "\n    ") for line in rest)]
        blocks.append("\n".join(lines) + "\n")
    return ("\n" if any(columns) else "").join(blocks)


def printable(text: str) -> str:
    """Text of others without control characters, which could write anywhere on a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


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
def steps_bar() -> Iterator[Any]:
    """Gives a callable (what, done, all) that draws a bar of cases on stderr; None where it's no
    terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def draw(what: str, done: int, total: int) -> None:
            if bar.tasks[0].description != what:
                bar.reset(task, total=total, description=what)
            bar.update(task, completed=done)

        yield draw


def stage_line(what: str, done: int, total: int) -> None:
    """Says on stderr that a part of a start begins, of so many steps."""
    if done == 0:
        note(f"{what}: {total} step{'s' * (total != 1)}")


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Says on stderr that something goes on whose length isn't known, where that is a terminal."""
    console = Console(stderr=True)
    with console.status(Text(what)) if console.is_terminal else nullcontext():
        yield


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
