"""Sub-commands of other distributions: added, missing, broken, contended."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from ml4core import __version__
from ml4core.cli import commands

GOOD = """\
import typer
app = typer.Typer()

@app.callback()
def top() -> None:
    "Measure things."

@app.command()
def go(count: int = 1) -> None:
    print("went", count)

@app.command()
def fail() -> None:
    raise ValueError("no luck")
"""
IMPORTED = "import builtins\nbuiltins.ml4_test_imported = True\n"


def test_an_installed_command_runs(ml4: Any, site: Any) -> None:
    site.command("measure", GOOD)
    assert ml4("measure", "go", "--count", "3") == (0, "went 3\n", "")


def test_its_faults_end_as_those_of_core_do(ml4: Any, site: Any) -> None:
    site.command("measure", GOOD)
    done = ml4("measure", "go", "--count", "x")
    assert (done.code, done.out) == (2, "")
    assert "'--count'" in done.err
    done = ml4("measure", "fail")
    assert (done.code, done.out) == (1, "")
    assert "ValueError: no luck" in done.err


def test_help_names_it_without_importing_it(
    ml4: Any, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.ml4_test_imported", False, raising=False)
    site.command("measure", IMPORTED + GOOD)
    done = ml4("--help")
    assert done.code == 0
    assert "measure" in done.out
    assert "extra 1.5" in done.out
    import builtins

    assert builtins.ml4_test_imported is False  # type: ignore[attr-defined]
    assert ml4("measure", "go").code == 0
    assert builtins.ml4_test_imported is True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named"),
        ("raise RuntimeError('odd')", "RuntimeError: odd"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("app = 5", "brings a int"),
        ("other = 5", "AttributeError"),
    ],
)
def test_a_broken_one_says_so_and_harms_no_other(
    ml4: Any, site: Any, source: str, told: str
) -> None:
    site.command("measure", source)
    assert ml4("--version").code == 0
    done = ml4("--help")
    assert done.code == 0
    assert "measure" in done.out
    done = ml4("measure", "go")
    assert (done.code, done.out) == (1, "")
    assert "ml4 measure: extra 1.5" in done.err
    assert told in done.err


def test_two_of_one_name_are_refused_naming_both(ml4: Any, site: Any) -> None:
    site.command("measure", GOOD, "first")
    site.command("measure", GOOD, "second")
    assert ml4("--help").code == 0
    done = ml4("measure", "go")
    assert (done.code, done.out) == (1, "")
    assert "first 1.5 and second 1.5" in done.err


def test_a_command_of_core_can_not_be_taken_over(ml4: Any, site: Any) -> None:
    site.command("inspect", "raise SystemExit(7)")
    done = ml4("inspect", "/no/such/folder")
    assert done.code == 1
    assert "no such folder" in done.err


@pytest.mark.parametrize("name", sorted(commands.BROUGHT_BY))
@pytest.mark.parametrize("release", ["0.1.0", None])
def test_a_known_missing_one_says_how_to_get_it(
    ml4: Any, monkeypatch: pytest.MonkeyPatch, name: str, release: str | None
) -> None:
    distribution = commands.BROUGHT_BY[name]

    def version(asked: str) -> str:
        assert asked == distribution
        if release is None:
            raise PackageNotFoundError(asked)
        return release

    monkeypatch.setattr(commands, "entry_points", lambda group: ())
    monkeypatch.setattr(commands, "version", version)
    done = ml4(name, "run", "--backend", "x")
    assert (done.code, done.out) == (2, "")
    if release is None:
        assert f"{distribution} is not installed; pip install 'ml4core[{name}]'" in done.err
    else:
        assert f"{distribution} {release} brings no such command" in done.err


def test_an_unknown_one_is_a_usage_error(ml4: Any) -> None:
    done = ml4("genrate")
    assert (done.code, done.out) == (2, "")
    assert "Did you mean 'generate'?" in done.err


def test_words_are_those_of_the_process_by_default(
    ml4: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ml4core.cli import main

    monkeypatch.setattr(sys, "argv", ["ml4", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith(f"ml4core {__version__} ")
