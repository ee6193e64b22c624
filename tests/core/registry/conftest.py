"""Plugins made for one test: a folder on the path with real distribution metadata and a module."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ml4core.registry import PluginRecord, discover

HONEST_PROBE = "return Probe(devices=(DEVICE,))"
HONEST_CAPABILITIES = (
    "return Capabilities(frozenset({'op:topk'}), {'kv': 'bf16'}, {'max_topk': 64})"
)

SOURCE = """\
import os, signal, subprocess, sys, time
from ml4core.api import Capabilities, Device, Probe, Refusal, hookimpl
{top}
DEVICE = Device("real", "a chip", "arch1", "cpu", 0, 2**30, {{"library": "3.2"}})


class Backend:
    name = {name!r}
    priority = {priority!r}

    def probe(self):
        {probe}

    def capabilities(self, device):
        {capabilities}

    def open(self, deployment):
        raise AssertionError("no test opens it")


@hookimpl
def ml4core_backends():
    {backends}


{bottom}
"""


class Site:
    """A folder that `sys.path` holds; each plugin in it is a distribution of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def plugin(
        self,
        name: str,
        *,
        distribution: str = "",
        version: str = "1.0",
        keywords: str | None = "ml4core-api:1-1",
        target: str = "",
        source: str | None = None,
        priority: object = 10,
        probe: str = HONEST_PROBE,
        capabilities: str = HONEST_CAPABILITIES,
        backends: str = "return [Backend()]",
        top: str = "",
        bottom: str = "",
    ) -> str:
        """Install a plugin, honest but for what is given; its module is `plug_<distribution>`."""
        distribution = distribution or f"dist-{name}"
        module = f"plug_{distribution.replace('-', '_')}"
        if source is None:
            source = SOURCE.format(
                top=top,
                name=name,
                priority=priority,
                probe=probe.replace("\n", "\n        "),
                capabilities=capabilities.replace("\n", "\n        "),
                backends=backends,
                bottom=bottom,
            )
        (self.folder / f"{module}.py").write_text(source, "utf-8")
        self.metadata(distribution, version, keywords, {name: target or module})
        return module

    def metadata(
        self, distribution: str, version: str, keywords: str | None, entry_points: dict[str, str]
    ) -> None:
        lines = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
        self.raw_metadata(distribution, version, keywords, f"[ml4core.backends]\n{lines}")

    def raw_metadata(
        self, distribution: str, version: str, keywords: str | None, entry_points: str
    ) -> None:
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        stated = "" if keywords is None else f"Keywords: {keywords}\n"
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{stated}"
        (info / "METADATA").write_text(text, "utf-8")
        (info / "entry_points.txt").write_text(entry_points, "utf-8")

    def records(self) -> tuple[PluginRecord, ...]:
        """Those of this folder alone, whatever else is installed where the tests run."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(sys, "path", [str(self.folder), sysconfig.get_path("stdlib")])
            return discover()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("ML4_PROBE_TIMEOUT", raising=False)
    yield Site(folder)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def python(site: Site) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a program that sees the same packages and plugins as this process."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
