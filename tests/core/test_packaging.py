"""The six distributions as a user gets them: built, looked into, installed, and run elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ml4core.api.version import API_KEYWORD, API_VERSION

ROOT = Path(__file__).resolve().parents[2]

# distribution -> its project folder and its package
PROJECTS = {
    "ml4core": (".", "ml4core"),
    "ml4core-triton": ("backends/triton", "ml4core_triton"),
    "ml4core-cuda": ("backends/cuda", "ml4core_cuda"),
    "ml4core-rocm": ("backends/rocm", "ml4core_rocm"),
    "ml4core-tpu": ("backends/tpu", "ml4core_tpu"),
    "ml4core-conformance": ("conformance", "ml4core_conformance"),
}
BACKENDS = {
    "cpu": ("ml4core", "ml4core.cpu"),
    "cuda": ("ml4core-cuda", "ml4core_cuda"),
    "rocm": ("ml4core-rocm", "ml4core_rocm"),
    "tpu": ("ml4core-tpu", "ml4core_tpu"),
}
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)

each_distribution = pytest.mark.parametrize("distribution", PROJECTS)


class Wheel:
    """A built wheel, opened for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive = zipfile.ZipFile(path)
        self.files = {name for name in self.archive.namelist() if not name.endswith("/")}
        (self.info,) = {name.split("/")[0] for name in self.files if ".dist-info/" in name}

    def read(self, name: str) -> str:
        return self.archive.read(f"{self.info}/{name}").decode()

    @property
    def metadata(self) -> Message:
        return Parser().parsestr(self.read("METADATA"))

    def entry_points(self, group: str) -> dict[str, str]:
        """Return name -> module or object of the entry points of a group."""
        name = f"{self.info}/entry_points.txt"
        parser = ConfigParser(delimiters="=")
        parser.read_string(self.archive.read(name).decode() if name in self.files else "")
        return dict(parser[group]) if group in parser else {}


def run(*command: str | Path, cwd: Path, timeout: float = 240) -> str:
    """Run a command that sees no setting of this process's Python or pip, and return its output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "PYTHON", "PYTEST", "VIRTUAL_ENV"))
    }
    environment["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        timeout=timeout,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: no build sees what earlier ones left, nor leaves anything in it."""
    return Path(
        shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "ml4 core", ignore=NOT_SOURCE)
    )


@pytest.fixture(scope="module")
def wheels(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Wheel]]:
    """Distribution name -> its wheel."""
    out = tmp_path_factory.mktemp("wheels")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", out),
        *(f"./{folder}" for folder, _ in PROJECTS.values()),
        cwd=source,
    )
    built = [Wheel(path) for path in sorted(out.glob("*.whl"))]
    yield {wheel.metadata["Name"]: wheel for wheel in built}
    for wheel in built:
        wheel.archive.close()


def test_six_distributions_are_built(wheels: dict[str, Wheel]) -> None:
    assert wheels.keys() == PROJECTS.keys()


@each_distribution
def test_metadata(wheels: dict[str, Wheel], distribution: str) -> None:
    wheel = wheels[distribution]
    assert wheel.path.name.endswith("-py3-none-any.whl")
    assert wheel.metadata["Version"] == wheels["ml4core"].metadata["Version"]
    assert wheel.metadata["Requires-Python"] == ">=3.11"
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in wheel.read("licenses/LICENSE")


@each_distribution
def test_siblings_are_required_at_the_same_version(
    wheels: dict[str, Wheel], distribution: str
) -> None:
    requirements = [
        Requirement(text) for text in wheels[distribution].metadata.get_all("Requires-Dist", [])
    ]
    siblings = {r.name: str(r.specifier) for r in requirements if r.name in PROJECTS}
    if distribution == "ml4core":
        expected = PROJECTS.keys() - {"ml4core", "ml4core-triton"}
    elif distribution in ("ml4core-cuda", "ml4core-rocm"):
        expected = {"ml4core", "ml4core-triton"}
    else:
        expected = {"ml4core"}
    assert siblings == dict.fromkeys(expected, f"=={wheels['ml4core'].metadata['Version']}")
    # torch-xla binds an older torch, so what is said about torch is said once.
    assert [r.name for r in requirements].count("torch") == (distribution == "ml4core")


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_states_its_module_and_its_api(wheels: dict[str, Wheel], backend: str) -> None:
    distribution, module = BACKENDS[backend]
    wheel = wheels[distribution]
    assert wheel.entry_points("ml4core.backends") == {backend: module}
    assert f"{module.replace('.', '/')}/__init__.py" in wheel.files
    ranges = [
        re.fullmatch(rf"{API_KEYWORD}:(\d+)-(\d+)", keyword.strip())
        for keyword in wheel.metadata["Keywords"].split(",")
        if keyword.strip().startswith(API_KEYWORD)
    ]
    assert len(ranges) == 1
    assert ranges[0], f"malformed API keyword in {wheel.metadata['Keywords']!r}"
    assert int(ranges[0][1]) <= API_VERSION <= int(ranges[0][2])


def test_command(wheels: dict[str, Wheel]) -> None:
    assert wheels["ml4core"].entry_points("console_scripts") == {"ml4": "ml4core.cli:main"}


@each_distribution
def test_holds_its_package_whole_and_nothing_else(
    wheels: dict[str, Wheel], source: Path, distribution: str
) -> None:
    folder, package = PROJECTS[distribution]
    project = source / folder
    expected = {
        path.relative_to(project).as_posix()
        for path in (project / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    wheel = wheels[distribution]
    assert {name for name in wheel.files if not name.startswith(wheel.info)} == expected
    assert f"{package}/py.typed" in expected
    assert not [name for name in expected if re.search(r"(^|/)(tests?/|test_|conftest)", name)]


def test_assets_are_inside(wheels: dict[str, Wheel]) -> None:
    assert any(name.startswith("ml4core/assets/") for name in wheels["ml4core"].files)


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the six wheels.

    Its dependencies are those of this process, linked one by one, so that an editable install of
    ours is left out.
    """
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "env", symlinks=True)
    binaries = home / "env" / "bin"
    run(
        *(sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--quiet"),
        *("--disable-pip-version-check", "--no-deps", "--no-index"),
        *(wheel.path for wheel in wheels.values()),
        cwd=home,
    )
    dependencies = home / "dependencies"
    dependencies.mkdir()
    for folder in map(Path, sys.path):
        if folder.name in ("site-packages", "dist-packages") and folder.is_dir():
            for entry in folder.iterdir():
                link = dependencies / entry.name
                ours = entry.name.startswith(("ml4core", "__editable__"))
                if not (ours or entry.suffix == ".pth" or link.is_symlink()):
                    link.symlink_to(entry)
    (site_packages,) = (home / "env" / "lib").glob("python*/site-packages")
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n", "utf-8")
    return binaries


def test_installed_packages_are_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    packages = [package for _, package in PROJECTS.values()]
    lines = run(
        installed / "python",
        "-c",
        f"import {', '.join(packages)}\nfor p in ({', '.join(packages)}): print(p.__file__)",
        cwd=tmp_path,
    ).splitlines()
    assert len(lines) == len(packages)
    assert all(Path(line).is_relative_to(installed.parent) for line in lines), lines


def test_installed_command_tells_its_version(
    installed: Path, wheels: dict[str, Wheel], tmp_path: Path
) -> None:
    output = run(installed / "ml4", "--version", cwd=tmp_path)
    assert wheels["ml4core"].metadata["Version"] in output


def test_installed_command_lists_the_backends(installed: Path, tmp_path: Path) -> None:
    listed = json.loads(run(installed / "ml4", "backends", "--json", cwd=tmp_path))
    assert {backend["name"] for backend in listed} == BACKENDS.keys()


def test_every_direct_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = {
        requirement.name: requirement
        for requirement in (Requirement(line) for line in lines if line and line[0] != "#")
    }
    loose = [str(pin) for pin in pins.values() if not re.fullmatch(r"==[^*]+", str(pin.specifier))]
    assert not loose, f"not pinned to one version: {loose}"
    for folder, _ in PROJECTS.values():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))
        texts = list(project["build-system"]["requires"]) + project["project"]["dependencies"]
        for extra in project["project"].get("optional-dependencies", {}).values():
            texts += extra
        for requirement in map(Requirement, texts):
            if requirement.name in PROJECTS:
                continue
            assert requirement.name in pins, f"{folder}: no pin of {requirement}"
            version = str(pins[requirement.name].specifier).removeprefix("==")
            assert requirement.specifier.contains(version), f"{folder}: {requirement}, {version}"
