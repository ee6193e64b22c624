"""Prompts from the command line, files and stdin."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ml4core.cli.exits import UsageError
from ml4core.engine.errors import RequestError
from ml4core.models.errors import os_reason
from ml4core.serving.tokenizer import check_text

STDIN = "-"


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> list[tuple[str, str]]:
    """(where it came from, text) of each prompt: those of ``--prompt``, then the files.

    Without any, stdin is read if it isn't a terminal. Raises RequestError for an empty prompt, and
    for bytes that aren't UTF-8.
    """
    if not texts and not files:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError("no prompt; give --prompt TEXT, --prompt-file FILE, or one on stdin")
        files = [STDIN]
    if list(files).count(STDIN) > 1:
        raise UsageError("--prompt-file -: stdin can be read only once")
    found = [("--prompt", text) for text in texts]
    found += [
        (f"--prompt-file {file}" if file != STDIN else "stdin", _read(file)) for file in files
    ]
    for field, text in found:
        if not text:
            raise RequestError(field, "empty", "some text")
        check_text(text, field)
    return found


def _read(file: str) -> str:
    """The whole file, less one newline at its end."""
    field = "stdin" if file == STDIN else "--prompt-file"
    try:
        raw = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as error:
        raise RequestError(
            field, f"{file}: {os_reason(error)}", "a file that can be read"
        ) from error
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        byte = f"{file}: byte {raw[error.start]:#04x} at {error.start} is no UTF-8"
        raise RequestError(field, byte, "UTF-8 text") from error
    return text.removesuffix("\n").removesuffix("\r")
