"""The text of a safetensors header, read entry by entry in bounded memory."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from ml4core.models.errors import CheckpointError, shown
from ml4core.models.strict_json import decode

CHUNK_BYTES = 1 << 20
MAX_ENTRY_BYTES = 64 << 10  # one tensor's name, dtype, shape and offsets
MAX_METADATA_BYTES = 4 << 20

# Possessive throughout: a failed match costs one pass, whatever the bytes are.
_SPACE = rb"[ \t\n\r]*+"
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_FLAT_OBJECT = rb'\{(?:[^{}"]++|' + _STRING + rb")*+\}"
_SPACES = re.compile(_SPACE)
_KEY = re.compile(_STRING + _SPACE + rb":" + _SPACE, re.DOTALL)
_ENTRY = re.compile(
    rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE + rb"(" + _FLAT_OBJECT + rb")", re.DOTALL
)


class HeaderText:
    """A header's JSON object, `length` bytes from the position of `file` on.

    A window of the text is held, not the whole; no entry may be larger than the window, so that
    neither the text nor what it decodes to can grow with the file.
    """

    def __init__(self, path: Path, file: BufferedReader, length: int) -> None:
        self._path = path
        self._file = file
        self._unread = length
        self._window = b""
        self._at = 0  # position in the window
        self._dropped = 0  # bytes of the header before the window
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def entries(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each key and its flat object, in the file's order, repeated keys included."""
        self._begin()
        if not self._take(b"}"):
            yield self._entry()
            while self._take(b","):
                yield self._entry()
            if not self._take(b"}"):
                raise self._wrong(f"',' or '}}' is due, found {self._next()}")
        self._skip_space()
        if self._at < len(self._window):
            raise self._wrong(f"ends before {self._next()}")

    def _begin(self) -> None:
        self._fill(1)
        if self._window[:1] == b"{":
            self._at = 1
        elif self._window[:1] in b'["-0123456789tfn':
            raise CheckpointError(
                f"{self._path}: header is not an object; it must begin with '{{', not with "
                f"{self._next()}"
            )
        else:
            raise self._wrong(f"it must begin with '{{', not with {self._next()}")

    def _entry(self) -> tuple[str, dict[str, Any]]:
        self._skip_space()
        self._fill(MAX_ENTRY_BYTES)
        metadata = self._window.startswith(b'"__metadata__"', self._at)
        limit = MAX_METADATA_BYTES if metadata else MAX_ENTRY_BYTES
        self._fill(limit)
        found = _ENTRY.match(self._window, self._at, self._at + limit)
        if found is None:
            raise self._no_entry(limit)
        try:
            key = decode(found[1].decode())
            value = decode(found[2].decode())
        except ValueError as error:
            text = shown(found[0].decode())
            raise self._wrong(f"entry {text}: {error}") from error
        self._at = found.end()
        return key, value

    def _no_entry(self, limit: int) -> CheckpointError:
        key = _KEY.match(self._window, self._at, self._at + limit)
        if key is not None and self._window[key.end() : key.end() + 1] not in (b"{", b""):
            name = shown(key[0].decode(errors="replace").rstrip(" \t\r\n:"))
            self._at = key.end()
            return CheckpointError(
                f"{self._path}: header entry {name} holds {self._next()}..., not an object"
            )
        if len(self._window) - self._at > limit:
            return CheckpointError(
                f"{self._path}: header has no whole entry in {limit} bytes, the most that one "
                f"may take, from byte {self._dropped + self._at}: {self._next()}..."
            )
        return self._wrong(f"no tensor name with a flat, closed object at {self._next()}")

    def _take(self, char: bytes) -> bool:
        self._skip_space()
        if not self._window.startswith(char, self._at):
            return False
        self._at += 1
        return True

    def _skip_space(self) -> None:
        while True:
            self._fill(1)
            found = _SPACES.match(self._window, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._window) or not self._unread:
                return

    def _fill(self, count: int) -> None:
        """Hold `count` bytes from here on and one more, or all that are left."""
        held = len(self._window) - self._at
        if held > count or not self._unread:
            return
        more = self._file.read(min(self._unread, max(CHUNK_BYTES, count + 1 - held)))
        if not more:
            raise CheckpointError(f"{self._path}: became shorter while its header was read")
        self._unread -= len(more)
        start = self._dropped + len(self._window)
        try:
            self._utf8.decode(more, final=not self._unread)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise CheckpointError(
                f"{self._path}: header is not UTF-8: byte {byte:#04x} near byte "
                f"{start + error.start}"
            ) from error
        self._dropped += self._at
        self._window = self._window[self._at :] + more
        self._at = 0

    def _next(self) -> str:
        text = self._window[self._at : self._at + 16]
        return shown(text.decode(errors="replace")) if text else "the end of the header"

    def _wrong(self, text: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: header is not JSON at byte {self._dropped + self._at}: {text}"
        )
