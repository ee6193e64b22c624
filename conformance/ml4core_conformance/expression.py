"""The language of ``-k``: words of check ids with ``and``, ``or``, ``not`` and parentheses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

Matches = Callable[[str], bool]

_TOKEN = re.compile(r"\s*(\(|\)|[^\s()]+)")


class ExpressionError(ValueError):
    """An expression that can't be read."""


def parse(text: str) -> Matches:
    """A function that tells whether a check id is meant.

    A word means the ids that hold it, whatever the case; with ``*`` or ``?`` it must match the
    whole id. Nothing at all means every id. Raises ``ExpressionError``.
    """
    if not text.strip():
        return lambda _: True
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match[1] for match in _TOKEN.finditer(text)]
        self._at = 0

    def parse(self) -> Matches:
        found = self._any()
        if self._at < len(self._tokens):
            self._fail(f"did not expect {self._tokens[self._at]!r}")
        return found

    def _any(self) -> Matches:
        parts = list(self._joined("or", self._all))
        return parts[0] if len(parts) == 1 else lambda id: any(part(id) for part in parts)

    def _all(self) -> Matches:
        parts = list(self._joined("and", self._one))
        return parts[0] if len(parts) == 1 else lambda id: all(part(id) for part in parts)

    def _joined(self, word: str, part: Callable[[], Matches]) -> Iterator[Matches]:
        yield part()
        while self._take(word):
            yield part()

    def _one(self) -> Matches:
        if self._take("not"):
            inner = self._one()
            return lambda id: not inner(id)
        if self._take("("):
            inner = self._any()
            if not self._take(")"):
                self._fail("a parenthesis is not closed")
            return inner
        if self._at == len(self._tokens):
            self._fail("a word is missing at its end")
        word = self._tokens[self._at]
        if word in ("and", "or", ")"):
            self._fail(f"a word is missing before {word!r}")
        self._at += 1
        return _word(word)

    def _take(self, word: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at] == word
        self._at += found
        return found

    def _fail(self, why: str) -> None:
        raise ExpressionError(
            f"-k {self._text!r}: {why}; works: words of check ids with and, or, not, ( and )"
        )


def _word(word: str) -> Matches:
    word = word.lower()
    if "*" in word or "?" in word:
        pattern = word.replace("[", "[[]")  # ids hold brackets; they mean themselves
        return lambda id: fnmatchcase(id.lower(), pattern)
    return lambda id: word in id.lower()
