"""Plugins that are broken in one way each, installed for a moment beside the one that is judged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

_PLUGIN = """\
import os, time
from ml4core.api import Capabilities, Device, Probe, hookimpl
{top}

class Neighbour:
    name = {name!r}
    priority = 1000

    def probe(self):
        {probe}

    def capabilities(self, device):
        return Capabilities(frozenset())

    def open(self, deployment):
        raise AssertionError("a neighbour must never be opened")


@hookimpl
def ml4core_backends():
    return [Neighbour()]
"""
_HONEST = "return Probe((Device('real', 'nowhere', 'none', 'cpu'),))"
PREFIX = "ml4_neighbour_"
"""Of the modules of all neighbours."""


@dataclass(frozen=True)
class Neighbour:
    """One broken plugin.

    Attributes:
        state: what a report must call it.
        says: what its reasons must speak of.
    """

    name: str
    state: str
    says: str
    top: str = ""
    probe: str = _HONEST
    keywords: str = "ml4core-api:1-1"
    distribution: str = ""


NEIGHBOURS = (
    Neighbour(
        "breaks", "broken", "a part is missing", top="raise ImportError('a part is missing')"
    ),
    Neighbour("hangs", "broken", "no answer within", probe="time.sleep(600)"),
    Neighbour("dies", "broken", "died", probe="os._exit(3)"),
    Neighbour("twin", "refused", "several plugins claim this name"),
    Neighbour("twin", "refused", "several plugins claim this name", distribution="ml4-other-twin"),
    Neighbour("newer", "refused", "supports API 900-901", keywords="ml4core-api:900-901"),
    Neighbour("silent", "refused", "states no API range", keywords=""),
)


@contextmanager
def installed() -> Iterator[Path]:
    """Installs them all in a folder at the end of ``sys.path``, and takes them away again."""
    with TemporaryDirectory(prefix="ml4-neighbours-") as name:
        folder = Path(name)
        for neighbour in NEIGHBOURS:
            _install(folder, neighbour)
        sys.path.append(name)
        try:
            yield folder
        finally:
            sys.path.remove(name)
            for module in [one for one in sys.modules if one.startswith(PREFIX)]:
                del sys.modules[module]


def _install(folder: Path, neighbour: Neighbour) -> None:
    distribution = neighbour.distribution or f"ml4-{neighbour.name}"
    module = PREFIX + distribution.replace("-", "_")
    source = _PLUGIN.format(top=neighbour.top, name=neighbour.name, probe=neighbour.probe)
    (folder / f"{module}.py").write_text(source, "utf-8")
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    keywords = f"Keywords: {neighbour.keywords}\n" if neighbour.keywords else ""
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n{keywords}", "utf-8"
    )
    (info / "entry_points.txt").write_text(
        f"[ml4core.backends]\n{neighbour.name} = {module}\n", "utf-8"
    )
