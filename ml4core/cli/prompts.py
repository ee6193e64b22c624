"""Prompts from the command line, files and stdin."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ml4core.cli.exits import UsageError
from ml4core.engine.errors import RequestError
from ml4core.engine.structured_outputs import StructuredOutputsParams
from ml4core.models import strict_json
from ml4core.models.errors import os_reason, shown
from ml4core.serving.tokenizer import check_text

STDIN = "-"
LINE_FORMS = '{"prompt": text} or {"messages": [{"role": ..., "content": ...}]}'

Source: TypeAlias = str | list[Any]
"""A text, or the messages of a chat."""


def read_prompts(
    texts: Sequence[str], files: Sequence[str], many: str | None = None
) -> list[tuple[str, Source]]:
    """(where it came from, prompt) of each: those of ``--prompt``, of the files, of the lines of
    ``--prompts``.

    Without any, stdin is read if it isn't a terminal. Raises RequestError for an empty prompt, and
    for bytes that aren't UTF-8.
    """
    if not texts and not files and many is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise UsageError(
                "no prompt; give --prompt TEXT, --prompt-file FILE, --prompts FILE, or one on stdin"
            )
        files = [STDIN]
    if [*files, many].count(STDIN) > 1:
        raise UsageError("stdin can be read only once")
    found: list[tuple[str, Source]] = [("--prompt", text) for text in texts]
    found += [
        (f"--prompt-file {file}" if file != STDIN else "stdin", _read(file, "--prompt-file"))
        for file in files
    ]
    if many is not None:
        found += _lines(many)
    for field, source in found:
        if not source:
            raise RequestError(field, "empty", "some text")
        if isinstance(source, str):
            check_text(source, field)
    return found


def read_schema(given: str) -> StructuredOutputsParams:
    """The form of ``--json-schema``: a schema's text, which begins with a brace, or its file."""
    text = given if given.lstrip().startswith("{") else _read(given, "--json-schema")
    try:
        return StructuredOutputsParams(json=text)
    except RequestError as error:
        raise RequestError("--json-schema", error.value, error.remedy) from error


def _lines(file: str) -> list[tuple[str, Source]]:
    """A prompt of each line that isn't blank; of a .jsonl file each is an object."""
    parse = _json if file.endswith(".jsonl") else lambda field, line: line
    where = "stdin" if file == STDIN else f"--prompts {file}"
    found = [
        (f"{where}, line {number}", parse(f"{where}, line {number}", line))
        for number, line in _numbered(_read(file, "--prompts"))
    ]
    if not found:
        raise RequestError("--prompts", f"{file}: no prompt", "a file with a prompt a line")
    return found


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    """Only a newline ends a line: other separators of Unicode may stand in a prompt."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _json(field: str, line: str) -> Source:
    try:
        value = strict_json.decode(line)
    except ValueError as error:
        raise RequestError(field, str(error), LINE_FORMS) from error
    if not isinstance(value, dict) or len(value) != 1:
        raise RequestError(field, shown(value), LINE_FORMS)
    ((key, source),) = value.items()
    if (key, type(source)) not in (("prompt", str), ("messages", list)):
        raise RequestError(field, shown(value), LINE_FORMS)
    prompt: Source = source
    return prompt


def _read(file: str, option: str) -> str:
    """The whole file, less one newline at its end."""
    field = "stdin" if file == STDIN else option
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
