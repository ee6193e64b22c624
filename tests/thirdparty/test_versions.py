"""A plugin that was written for an older interface is served unchanged, for one version more."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml4core.api import API_VERSION, SUPPORTED_API_VERSIONS
from ml4core_conformance.results import load

HERE = Path(__file__).resolve().parent
FROZEN = {
    "ml4core_example_api1.py": "61ea7169893ca37d092fda9b3ba67084dd7fae22fa4921e292b513892e6335af",
    "pyproject.toml": "6639c3b8a689b32137b0615766dde273b9a05996e3794f38e43a092a058bcc46",
}
"""SHA-256 of the files of ``example_api1``: what core promised to serve, so they never change."""

LATER = """
import ml4core.api as api
from ml4core.api import version
api.API_VERSION = version.API_VERSION = {version}
served = frozenset({{{version}, {version} - 1}})
api.SUPPORTED_API_VERSIONS = version.SUPPORTED_API_VERSIONS = served
"""
"""Python that makes this core one of a later version."""

NEWER = """
from functools import partial
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.checks import plugin
def fails(subject):
    raise CheckFailed("it judges newer backends alone")
found = plugin.checks()
found.append(Check("plugin.newer", "plugin", fails, "A check of version 2.", since=2))
plugin.checks = lambda: found
"""
"""Python that adds a check which older plugins could not know of."""

RUN = ("conformance", "run", "--backend", "example-api1", "--jobs", "0", "-k", "plugin or silu")

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def frozen(install: Callable[[str], Any]) -> Any:
    return install("example_api1")


def test_it_is_frozen() -> None:
    found = {name: hashlib.sha256((HERE / "example_api1" / name).read_bytes()) for name in FROZEN}
    assert {name: digest.hexdigest() for name, digest in found.items()} == FROZEN


def test_core_serves_this_version_and_the_one_before() -> None:
    assert {API_VERSION, API_VERSION - 1} - {0} == SUPPORTED_API_VERSIONS


@pytest.mark.parametrize("version", [1, 2])
def test_it_is_judged_by_what_it_could_know(frozen: Any, version: int) -> None:
    first = "" if version == 1 else LATER.format(version=version) + NEWER
    done = frozen.ml4(*RUN, "--json", "result.json", first=first)
    assert done.returncode == 0, done.stdout
    result = load(frozen.checkout / "result.json")
    assert result.verdict == "conformant"
    assert result.selection.api == 1
    assert "plugin.newer" not in {each.id for each in result.results}


def test_asked_for_it_is_judged_as_a_newer_one(frozen: Any) -> None:
    first = LATER.format(version=2) + NEWER
    done = frozen.ml4(*RUN, "--api", "2", first=first)
    assert done.returncode == 1
    assert "it judges newer backends alone" in done.stdout


def test_two_versions_later_it_is_refused_unread(frozen: Any) -> None:
    (frozen.site / "ml4core_example_api1.py").rename(frozen.site / "away.py")
    try:
        done = frozen.ml4(*RUN, first=LATER.format(version=3))
    finally:
        (frozen.site / "away.py").rename(frozen.site / "ml4core_example_api1.py")
    assert done.returncode == 3
    assert "1-1" in done.stdout
    assert "2, 3" in done.stdout
