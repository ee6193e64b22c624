"""``ml4 doctor``: what is here, what is missing, and the line that installs it."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ml4core import API_VERSION, __version__
from ml4core.cli import commands, exits, output
from ml4core.cli.backends import devices

if TYPE_CHECKING:
    from ml4core.registry import BackendReport

DISTRIBUTION = "ml4core"
SIBLINGS = ("cuda", "rocm", "tpu", "conformance")
EMBEDDED = "cpu"
TORCH_FLOOR = (2, 9)
_IMPORT_NAMES = {"huggingface-hub": "huggingface_hub", "mistral-common": "mistral_common"}


@dataclass(frozen=True)
class Finding:
    """One line. ``remedy`` is what to run, where the state isn't ``ok``."""

    subject: str
    state: Literal["ok", "absent", "fault"]
    found: str
    remedy: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects.")] = False,
) -> int:
    """Show versions, devices, and what is missing. Exit code 1 if not even the cpu backend runs."""
    from ml4core import registry

    reports = registry.report()
    findings = [
        *_core(),
        *_requirements(),
        *_siblings(),
        *_commands(),
        *(_backend(report) for report in reports),
        *_cpu_backend(reports),
        _cache(),
    ]
    if as_json:
        output.write_json([asdict(finding) for finding in findings])
    else:
        columns = ("", "STATE", "FOUND", "REMEDY")
        rows = [(f.subject, f.state, f.found, f.remedy) for f in findings]
        output.write(output.table(columns, rows, sys.stdout))
    runs = any(r.record.name == EMBEDDED and r.result.state == "ok" for r in reports)
    return exits.OK if runs else exits.ERROR


def _core() -> Iterator[Finding]:
    found = f"{platform.python_version()}, {sys.executable}"
    old = sys.version_info < (3, 11)
    yield Finding("python", "fault" if old else "ok", found, "Python 3.11 or newer" if old else "")
    yield Finding(
        "ml4core", "ok", f"{__version__}, plugin API {API_VERSION}, {Path(__file__).parents[1]}"
    )


def _requirements() -> Iterator[Finding]:
    """The libraries that ml4core needs, each imported."""
    try:
        lines = [line for line in requires(DISTRIBUTION) or [] if "extra ==" not in line]
    except PackageNotFoundError:
        yield Finding(
            "requirements",
            "fault",
            "ml4core runs from a folder and is not installed",
            "pip install -e .",
        )
        return
    for line in lines:
        name = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
        yield _library(name, line.split(";")[0].strip())


def _library(name: str, requirement: str) -> Finding:
    install = f"pip install '{requirement}'"
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, "fault", "not installed", install)
    try:
        import_module(_IMPORT_NAMES.get(name, name.replace("-", "_")))
    except Exception as error:  # a broken install may raise anything
        return Finding(name, "fault", f"{found}, but {type(error).__name__}: {error}", install)
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    if name == "torch" and numbers < TORCH_FLOOR:
        return Finding(name, "fault", f"{found} is older than 2.9", install)
    return Finding(name, "ok", found)


def _siblings() -> Iterator[Finding]:
    for extra in SIBLINGS:
        name = f"{DISTRIBUTION}-{extra}"
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, "absent", "not installed", f"pip install '{DISTRIBUTION}[{extra}]'")
            continue
        same = found == __version__
        remedy = "" if same else f"pip install '{DISTRIBUTION}[{extra}]=={__version__}'"
        yield Finding(name, "ok" if same else "fault", found, remedy)


def _commands() -> Iterator[Finding]:
    for name, found in sorted(commands.installed().items()):
        origins = ", ".join(sorted(map(commands.origin, found)))
        contended = len(found) > 1
        yield Finding(
            f"command {name}",
            "fault" if contended else "ok",
            origins,
            "uninstall one" if contended else "",
        )


def _backend(report: BackendReport) -> Finding:
    result = report.result
    state: Literal["ok", "absent", "fault"] = "fault"
    if result.state in ("ok", "unavailable"):
        state = "ok" if result.state == "ok" else "absent"
    reasons = [f"{refusal.subject}: {refusal.reason}" for refusal in result.refusals]
    remedies = [refusal.remedy for refusal in result.refusals if refusal.remedy]
    found = "\n".join([result.state, *devices(report), *reasons])
    return Finding(f"backend {report.record}", state, found, "\n".join(remedies))


def _cpu_backend(reports: list[BackendReport]) -> Iterator[Finding]:
    if not any(report.record.name == EMBEDDED for report in reports):
        remedy = "pip install --force-reinstall --no-deps ml4core"
        yield Finding(
            f"backend {EMBEDDED}", "fault", "not registered by any installed distribution", remedy
        )


def _cache() -> Finding:
    """Whether downloads from the hub can be kept."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError as error:
        return Finding("hub cache", "fault", str(error), "pip install huggingface-hub")
    folder = Path(HF_HUB_CACHE)
    parent = next(place for place in (folder, *folder.parents) if place.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        return Finding(
            "hub cache", "fault", f"{folder} can't be written", "set HF_HOME to a folder of yours"
        )
    return Finding("hub cache", "ok", str(folder))
