"""Texts that no shipped model was trained on, and how they are cut."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from ml4core.engine.errors import RequestError
from ml4core.models.errors import os_reason
from ml4core.serving.tokenizer import Tokenizer

NAMES = ("books", "children")
WINDOW = 2048
"""Ids of a window, the one of the beginning included."""


def asset(name: str) -> Path:
    """A file that is shipped for evaluation."""
    return Path(str(resources.files("ml4core"))) / "assets" / "eval" / name


def shipped() -> dict[str, str]:
    return {name: asset(f"{name}.txt").read_text("utf-8") for name in NAMES}


def read(path: Path) -> str:
    """Raises ``RequestError`` for a file that can't be read, or holds no UTF-8 text."""
    try:
        text = path.expanduser().read_text("utf-8")
    except OSError as error:
        raise RequestError(
            "--text", f"{path}: {os_reason(error)}", "a file that can be read"
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError("--text", f"{path}: {error}", "UTF-8 text") from error
    if not text.strip():
        raise RequestError("--text", f"{path}: empty", "some text")
    return text


def windows(text: str, tokenizer: Tokenizer, size: int) -> list[list[int]]:
    """The text in pieces that follow one another, each behind the id of the beginning. A last piece
    under an eighth of ``size`` is left out, unless it is the only one: little stands before its
    tokens.
    """
    first, *ids = tokenizer.encode(text, "--text")
    pieces = [ids[i : i + size - 1] for i in range(0, len(ids), size - 1)]
    whole = [[first, *piece] for piece in pieces]
    return [piece for piece in whole if len(piece) >= size // 8] or whole[:1]


def summary(values: list[Any]) -> float:
    """The mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
