"""Tables on any terminal, and text of others that must not steer it."""

from __future__ import annotations

import io

import pytest

from ml4core.cli import output

COLUMNS = ("NAME", "STATE", "REASONS")
ROWS = [("cpu", "ok", ""), ("chip", "unavailable", "driver: there is none\nlibrary: too old")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [33, 40, 80, 200])
def test_a_table_fits_its_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    lines = output.table(COLUMNS, ROWS, Terminal()).replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert max(map(len, lines.splitlines())) <= width
    assert lines.split()[:3] == list(COLUMNS)


@pytest.mark.parametrize("width", [1, 10, 32])
def test_below_that_each_cell_has_its_own_line(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert output.table(COLUMNS, ROWS, Terminal()) == (
        "NAME: cpu\n  STATE: ok\n\n"
        "NAME: chip\n  STATE: unavailable\n"
        "  REASONS: driver: there is none\n    library: too old\n"
    )


def test_pairs_without_heads_stack_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    rows = [("layers", "12 of hidden size 256"), ("taps", "none")]
    expected = "layers\n  12 of hidden size 256\ntaps\n  none\n"
    assert output.table(("", ""), rows, Terminal()) == expected


def test_a_file_has_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    text = output.table(COLUMNS, ROWS, io.StringIO())
    assert text.splitlines()[1].split() == ["cpu", "ok"]


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    output.note("a\x1b[31m\u202e\udcff\nč")
    assert capsys.readouterr().err == "a\\x1b[31m\\u202e\\udcff\nč\n"
