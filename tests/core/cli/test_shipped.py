"""`ml4-tiny` on the command line: the model where none is named, and a name like any other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ml4core.models.embedded import EMBEDDED, embedded_folder

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("named", [[], [EMBEDDED]])
def test_generate_takes_it_where_no_model_is_named(ml4: Any, engine: Any, named: list[str]) -> None:
    done = ml4("generate", *named, "--prompt", "abc", "--max-tokens", "4")
    assert done.code == 0, done.err
    assert engine.args.model == str(embedded_folder())


def test_inspect_plan_and_quantize_know_its_name(ml4: Any, tmp_path: Path) -> None:
    facts = ml4("inspect", EMBEDDED, "--json").json
    assert facts["path"] == str(embedded_folder())
    assert "fp8_block" in facts["checkpoint"]["formats"]
    done = ml4("plan", EMBEDDED, "--json")
    assert done.code == 0
    assert done.json["model"] == str(embedded_folder())
    done = ml4("quantize", EMBEDDED, str(tmp_path / "small"), "--to", "nvfp4")
    assert done.code == 0, done.err
    assert "matrices fp8_block -> nvfp4" in done.err


@pytest.mark.usefixtures("probed_once")
def test_it_answers(ml4: Any) -> None:
    done = ml4("generate", "--prompt", "What is 12 + 30?", "--max-tokens", "12")
    assert done.code == 0, done.err
    assert "42" in done.out


@pytest.mark.slow
def test_the_quick_start_prints_what_the_readme_shows(ml4: Any) -> None:
    """`make run`, whose text the README shows."""
    (block,) = re.findall(r"^```\n\$ ml4 (generate (?:.|\n)*?)^```$", README, re.MULTILINE)
    command, shown = block.split("\n", 1)
    (run,) = re.findall(r"\$\(BIN\)/ml4 (generate .*)", (ROOT / "Makefile").read_text("utf-8"))
    assert run == command
    done = ml4(*shlex.split(command))
    assert (done.code, done.out) == (0, shown)
