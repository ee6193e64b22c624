"""The side environment of torch-xla: what is pinned, what is kept, and why it can't be made. None
is made here: commands are recorded.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.torch_xla import environment

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ["venv", "requirements", "stand-ins", "check", "ours"]


class Commands:
    """Stands for ``subprocess.run``: keeps what it is told, and does what makes a folder."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.words: list[tuple[str, ...]] = []
        self.fails = ""

    def __call__(self, words: tuple[str, ...], **given: Any) -> None:
        assert 0 < given["timeout"] <= 600
        assert "PYTHONPATH" not in given["env"]
        name = self._name(words)
        self.told.append(name)
        self.words.append(words)
        if name == self.fails:
            raise subprocess.CalledProcessError(1, words, "", "much\nERROR: no such release\n")
        if name == "venv":
            python = Path(words[-1], "bin", "python")
            python.parent.mkdir(parents=True)
            python.touch()
        elif name == "requirements":
            Path(words[0]).parents[1].joinpath("lib/python3.x/site-packages/torch").mkdir(
                parents=True
            )

    def _name(self, words: tuple[str, ...]) -> str:
        if "-r" in words:
            return "requirements"
        if "-e" in words:
            return "ours"
        if words[1].endswith("stand_ins.py"):
            return "stand-ins"
        return "check" if words[1] == "-c" else words[2]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    found = Commands()
    monkeypatch.setattr(subprocess, "run", found)
    monkeypatch.setattr(environment.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "version_info", (3, 11))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    return found


def pins(file: Path) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in file.read_text("utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def test_versions_are_pinned_and_those_of_the_main_environment() -> None:
    """But for torch, of the release that torch-xla is bound to."""
    mine, theirs = pins(environment.REQUIREMENTS), pins(ROOT / "constraints.txt")
    other = {name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]}
    assert other == {"torch"}
    assert mine["torch"].split(".")[:2] == mine["torch-xla"].split(".")[:2] == ["2", "9"]
    assert {"jax", "jaxlib", "libtpu", "numpy"} <= mine.keys() & theirs.keys()


def test_what_is_there_is_kept(commands: Commands, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "one"
    python = environment.ensure(folder)
    assert python == folder / "bin" / "python"
    assert commands.told == INSTALLED
    assert environment.ensure(folder) == python
    assert commands.told == INSTALLED


def test_it_is_made_anew_for_other_pins_or_another_python(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = tmp_path / "requirements.txt"
    pinned.write_bytes(environment.REQUIREMENTS.read_bytes())
    monkeypatch.setattr(environment, "REQUIREMENTS", pinned)
    python = environment.ensure(tmp_path / "one")
    pinned.write_text(pinned.read_text("utf-8") + "more==1\n", "utf-8")
    environment.ensure(tmp_path / "one")
    assert commands.told == INSTALLED * 2
    python.unlink()  # as where it leads to a Python that is gone
    environment.ensure(tmp_path / "one")
    assert commands.told == INSTALLED * 3


def test_another_checkout_installs_itself_alone(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.ensure(tmp_path / "one")
    other = tmp_path / "checkout"
    for name in environment.OURS:
        manifest = other / name / "pyproject.toml"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_bytes((ROOT / name / "pyproject.toml").read_bytes())
    monkeypatch.setattr(environment, "ROOT", other)
    environment.ensure(tmp_path / "one")
    assert commands.told == [*INSTALLED, "ours"]
    assert str(other) in commands.words[-1]


@pytest.mark.parametrize("step", INSTALLED)
def test_what_is_broken_off_is_made_anew(commands: Commands, tmp_path: Path, step: str) -> None:
    commands.fails = step
    with pytest.raises(environment.NotMade, match=r"ended with 1: ERROR: no such release$"):
        environment.ensure(tmp_path / "one")
    commands.told, commands.fails = [], ""
    environment.ensure(tmp_path / "one")
    assert commands.told == (["ours"] if step == "ours" else INSTALLED)


def test_a_command_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_LIMIT_S", 0.2)
    with pytest.raises(environment.NotMade, match=r"time.sleep.* took more than 0.2 seconds"):
        environment._run(sys.executable, "-c", "import time; time.sleep(60)")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("version", (3, 14), "Python 3.11 to 3.13; this is 3.14"),
        ("machine", "aarch64", "x86-64 Linux; this is linux aarch64"),
        ("tools", None, "need gcc, nm, readelf"),
    ],
)
def test_where_it_cannot_be(
    commands: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: Any,
    reason: str,
) -> None:
    if name == "version":
        monkeypatch.setattr(sys, "version_info", value)
    elif name == "machine":
        monkeypatch.setattr(environment.platform, "machine", lambda: value)
    else:
        monkeypatch.setattr(environment.shutil, "which", lambda name: value)
    with pytest.raises(environment.NotMade, match=re.escape(reason)):
        environment.ensure(tmp_path / "one")
    assert not commands.told


def test_settings_of_make_reach_pip(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_ARGS", "--index-url 'https://example.org/a b'")
    environment.ensure(tmp_path / "one")
    installs = [words for words in commands.words if "install" in words]
    assert len(installs) == 2
    for words in installs:
        assert words[words.index("--index-url") + 1] == "https://example.org/a b"
        assert "--no-deps" in words
