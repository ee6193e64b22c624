"""Distributions outside of ours, installed each into a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "write-a-backend.md"
collect_ignore_glob = ["example*/*"]  # their own tests, which are to be run in their checkouts
_ML4 = "import sys; from ml4core.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Installed:
    """A checkout of a plugin, and the folder that it was installed to."""

    checkout: Path
    site: Path

    def run(self, *command: str | Path, timeout: float = 540) -> subprocess.CompletedProcess[str]:
        """A command in the checkout, in an environment that has the plugin."""
        environment = {**os.environ, "PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTEST_ADDOPTS", None)
        return subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=self.checkout,
            env=environment,
            timeout=timeout,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )

    def ml4(
        self, *words: str | Path, first: str = "", timeout: float = 540
    ) -> subprocess.CompletedProcess[str]:
        """The command ``ml4``; ``first`` is Python that runs before it."""
        return self.run("-c", f"{first}\n{_ML4}", *words, timeout=timeout)


@pytest.fixture(scope="session")
def documented() -> Sequence[str]:
    """The four lines that lead from a checkout to a verdict, as the page has them."""
    block = PAGE.read_text("utf-8").partition("```console\n")[2].partition("```")[0]
    return [line.removeprefix("$ ") for line in block.splitlines()]


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Installed]:
    """Installs the plugin in a folder beside this file, as its users would: from a copy."""

    def make(name: str) -> Installed:
        home = tmp_path_factory.mktemp(name)
        checkout, site = home / "checkout", home / "site"
        shutil.copytree(HERE / name, checkout, ignore=shutil.ignore_patterns("__pycache__"))
        found = Installed(checkout, site)
        done = found.run(
            *("-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-index", "--no-build-isolation", "--target", site, checkout),
        )
        assert done.returncode == 0, done.stdout
        shutil.rmtree(checkout / "build", ignore_errors=True)
        return found

    return make
