"""The README is true: its commands exist, and its plugin loads."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from ml4core import registry
from ml4core.cli.app import build_app

README = (Path(__file__).resolve().parents[3] / "README.md").read_text("utf-8")


def block(language: str, holds: str = "") -> str:
    """The one block of a language that holds a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if holds in text]
    return str(found)


def test_its_commands_exist() -> None:
    lines = [line for line in README.splitlines() if line.startswith("ml4 ")]
    assert len(lines) >= 7
    for line in lines:
        words = shlex.split(re.split(r" {2,}", line)[0], comments=True)[1:]
        command: Any = typer.main.get_command(build_app())
        while words and hasattr(command, "resolve_command"):  # also into other distributions
            with typer.Context(command) as context:
                _, command, words = command.resolve_command(context, words)
        known = {name for param in command.params for name in param.opts}
        assert not hasattr(command, "resolve_command"), line
        assert {word for word in words if word.startswith("-")} <= known, line


def test_its_plugin_is_found_and_says_why_it_can_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads(block("toml"))["project"]
    (tmp_path / "my_backend.py").write_text(block("python", "ml4core_backends"), "utf-8")
    info = tmp_path / "my_backend-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        f"Keywords: {','.join(project['keywords'])}\n",
        "utf-8",
    )
    ((name, target),) = project["entry-points"]["ml4core.backends"].items()
    entry = f"[ml4core.backends]\n{name} = {target}\n"
    info.joinpath("entry_points.txt").write_text(entry, "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = registry.probe("mine")
    assert result.state == "unavailable"
    assert [refusal.reason for refusal in result.refusals] == ["no driver was found"]


def test_its_table_lists_the_backends_of_this_repository() -> None:
    rows = re.findall(r"^\| `(ml4core[a-z-]*)` \| `([a-z]+)` \|", README, re.MULTILINE)
    root = Path(__file__).resolve().parents[3]
    stated = {}
    for folder in (".", "backends/cuda", "backends/rocm", "backends/tpu"):
        project = tomllib.loads((root / folder / "pyproject.toml").read_text("utf-8"))["project"]
        (stated[project["name"]],) = project["entry-points"]["ml4core.backends"]
    assert dict(rows) == stated
