"""``docs/write-a-backend.md`` shows the example's own code."""

from __future__ import annotations

import doctest
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml4core.api import OPS, STAGES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "write-a-backend.md"
EXAMPLE = ROOT / "tests" / "thirdparty" / "example"

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SOURCE = re.compile(r"# (\S+\.(?:py|toml))\n")


def blocks(*languages: str) -> list[str]:
    found = BLOCK.findall(PAGE.read_text("utf-8"))
    return [text for language, text in found if language in languages]


NAMED = [text for text in blocks("python", "toml") if SOURCE.match(text)]


@pytest.mark.parametrize("text", NAMED, ids=[text.partition("\n")[0][2:] for text in NAMED])
def test_code_is_the_examples_own(text: str) -> None:
    named = SOURCE.match(text)
    assert named
    code = text[named.end() :]
    assert code.strip()
    assert code in (EXAMPLE / named[1]).read_text("utf-8")


def test_most_code_is_named() -> None:
    """Two blocks are not of the example: a look at the op table, and a stage: it has none."""
    others = [text for text in blocks("python", "toml") if text not in NAMED]
    assert len(NAMED) >= 12
    assert [text.split("(")[0].split()[0] for text in others] == [">>>", "def"]


def test_the_look_at_the_table() -> None:
    (text,) = (text for text in blocks("python") if text.startswith(">>>"))
    test = doctest.DocTestParser().get_doctest(text, {}, "page", str(PAGE), 0)
    told: list[str] = []
    failed, tried = doctest.DocTestRunner().run(test, out=told.append)
    assert tried == 3
    assert not failed, "".join(told)


def test_the_nine_words_and_what_is_named() -> None:
    page = PAGE.read_text("utf-8")
    rows = re.findall(r"^\| \*\*(\w+)\*\* \|", page, re.MULTILINE)
    assert len(rows) == 9
    for word, table in (("ffn", STAGES), ("sparse_mla", STAGES), ("decoder_layer", STAGES)):
        assert word in table
        assert f"`{word}`" in page or f'"{word}"' in page
    assert all(f"`{op}`" in page for op in ("kv_write", "gather_kv") if op in OPS)


def test_pages_link_to_it() -> None:
    for page in ("README.md", "docs/architecture.md"):
        assert "write-a-backend.md" in (ROOT / page).read_text("utf-8"), page


def test_the_waiver_is_a_real_one() -> None:
    table = tomllib.loads((EXAMPLE / "conformance.toml").read_text("utf-8"))
    assert list(table["waivers"]) == ["perf.steady_state[sync]"]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE.read_text("utf-8")):
        assert (PAGE.parent / target).exists(), target


def test_commands_exist(install: Callable[[str], Any]) -> None:
    """Each line with ``ml4`` is understood, up to the work that it asks for."""
    example = install("example")
    lines = [line for text in blocks("console") for line in text.splitlines()]
    commands = [line.removeprefix("$ ml4 ") for line in lines if line.startswith("$ ml4 ")]
    assert "conformance run --backend example" in commands
    for command in commands:
        path = command.split()[: 2 if command.startswith("conformance") else 1]
        done = example.ml4(*path, "--help")
        assert done.returncode == 0, (command, done.stdout)
        for flag in re.findall(r" (--?[a-z]+)", command):
            assert flag in done.stdout, (command, flag)
