"""Shipped texts, and how a text is cut into windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from ml4core.engine.errors import RequestError
from ml4core.evaluation import texts
from ml4core.serving.tokenizer import Tokenizer


def test_the_shipped_texts_are_long_enough(tokenizer: Tokenizer) -> None:
    found = texts.shipped()
    assert tuple(found) == texts.NAMES
    for text in found.values():
        assert len(texts.windows(text, tokenizer, texts.WINDOW)) >= 2


def test_windows_hold_every_token_once_behind_a_beginning(tokenizer: Tokenizer) -> None:
    text = texts.shipped()["books"]
    first, *ids = tokenizer.encode(text)
    pieces = texts.windows(text, tokenizer, 500)
    assert {piece[0] for piece in pieces} == {first}
    assert max(map(len, pieces)) == 500
    joined = [i for piece in pieces for i in piece[1:]]
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) < 500 // 8


def test_a_short_text_is_a_window(tokenizer: Tokenizer) -> None:
    assert texts.windows("One day", tokenizer, 500) == [tokenizer.encode("One day")]


@pytest.mark.parametrize("content", [b" \n", b"\xff\xfe"])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(RequestError, match="--text"):
        texts.read(tmp_path / "t.txt")
    with pytest.raises(RequestError, match="No such file"):
        texts.read(tmp_path / "none.txt")
