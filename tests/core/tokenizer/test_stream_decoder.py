"""B090: text that streams is the text of all ids, and no whole character is ever cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml4core.serving.tokenizer import Tokenizer

FIRST_BYTE = 64  # id of the byte 0x00; the 256 single bytes follow the special ids

SAMPLES = [
    "plain",
    "\U0001fae0",
    "鿜",
    "Příliš žluťoučký kůň",
    "שלום עולם",
    "e\u0301 👩‍👩‍👧 🇨🇿",
    "a\x00b\r\n\t",
]


def of_bytes(raw: bytes) -> list[int]:
    """One id for each byte, as a model may make them."""
    return [FIRST_BYTE + byte for byte in raw]


def pushed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_single_bytes_have_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.piece(FIRST_BYTE + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]


@pytest.mark.parametrize("text", SAMPLES)
def test_each_character_comes_with_its_last_byte(tokenizer: Tokenizer, text: str) -> None:
    expected = itertools.chain.from_iterable(
        [""] * (len(character.encode()) - 1) + [character] for character in text
    )
    assert pushed(tokenizer, of_bytes(text.encode())) == [*expected, ""]


@pytest.mark.parametrize("text", SAMPLES)
def test_cut_anywhere(tokenizer: Tokenizer, text: str) -> None:
    raw = text.encode()
    for end in range(len(raw) + 1):
        whole = raw[:end].decode(errors="ignore")
        cut = "" if raw[:end].decode(errors="replace") == whole else "\ufffd"
        *parts, last = pushed(tokenizer, of_bytes(raw[:end]))
        assert "".join(parts) == whole
        assert last == cut


@given(ids=st.lists(st.integers(0, 8191)))
def test_any_ids_join_to_the_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids)


@given(raw=st.binary())
def test_any_bytes_join_to_the_whole(tokenizer: Tokenizer, raw: bytes) -> None:
    assert "".join(pushed(tokenizer, of_bytes(raw))) == raw.decode(errors="replace")


@given(text=st.text())
def test_no_replacement_in_text_that_is_whole(tokenizer: Tokenizer, text: str) -> None:
    parts = pushed(tokenizer, of_bytes(text.encode()))
    assert "".join(parts) == text
    assert parts[-1] == ""
    assert "".join(pushed(tokenizer, tokenizer.encode(text))) == text


def test_special_ids_have_no_text_and_do_not_part_a_character(tokenizer: Tokenizer) -> None:
    first, *rest = of_bytes("é".encode())
    assert pushed(tokenizer, [first, tokenizer.eos_id, *rest]) == ["", "", "é", ""]


def test_streams_are_apart(tokenizer: Tokenizer) -> None:
    one, other = tokenizer.stream(), tokenizer.stream()
    first, second = of_bytes("é".encode())
    assert one.push(first) == ""
    assert other.push(FIRST_BYTE + ord("x")) == "x"
    assert one.push(second) == "é"
    assert other.flush() == ""
