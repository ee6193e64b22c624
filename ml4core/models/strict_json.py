"""JSON read strictly: UTF-8, no repeated key, finite numbers, a size limit."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

from ml4core.models.errors import CheckpointError, os_reason, shown


def decode(text: str) -> Any:
    """Decode one JSON value.

    Raises ValueError, with a reason fit for a message, for anything that readers of JSON may
    take in different ways: a repeated key, NaN and Infinity, numbers that overflow, nesting
    deeper than the interpreter's stack, text that has no UTF-8 form.
    """
    try:
        value = _DECODER.decode(text)
        if "\\u" in text:  # only an escape can give half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from error
    except UnicodeEncodeError as error:
        raise ValueError("a string holds half of a surrogate pair") from error
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return value


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises CheckpointError, naming file and reason."""
    with open_regular(path) as file:
        try:
            raw = file.read(max_bytes + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read: {os_reason(error)}") from error
    if len(raw) > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes} bytes, the most such a file holds")
    if not raw.strip():
        raise CheckpointError(f"{path}: empty file; it must hold a JSON object")
    try:
        value = decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: not UTF-8: byte {error.object[error.start]:#04x} at {error.start}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {shown(value)}; it must hold a JSON object")
    return value


def open_regular(path: Path) -> BufferedReader:
    """Open a plain file for reading bytes.

    A folder, pipe or device is refused, and never waited for. Raises CheckpointError.
    """
    try:
        # Not blocking: a named pipe would else wait for its writer. Plain files ignore the flag.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        hint = " (a link whose target is gone)" if path.is_symlink() else ""
        raise CheckpointError(f"{path}: no such file{hint}") from error
    except PermissionError as error:
        raise CheckpointError(
            f"{path}: permission denied; the user running this must be able to read it"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't be opened: {os_reason(error)}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a plain file")
    return open(descriptor, "rb")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"key {shown(_first_repeated(key for key, _ in pairs))} appears twice")
    return result


def _first_repeated(keys: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None


def _constant(token: str) -> float:
    raise ValueError(f"not JSON: the constant {token}; numbers must be finite")


def _float(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise ValueError(f"number {shown(token)} overflows; numbers must be finite")
    return value


def _int(token: str) -> int | float:
    # "-0" has a sign, which only a float keeps; a reader that wants a count then refuses it.
    return -0.0 if token == "-0" else int(token)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_float=_float, parse_int=_int, parse_constant=_constant
)
