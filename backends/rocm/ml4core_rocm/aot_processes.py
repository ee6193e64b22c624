"""Compiles for each architecture in a process of its own, with the triton that is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ml4core_rocm.aot import Compiled


def compiled(arch: str, keyword: str = "", triton: Path | None = None) -> Iterator[Compiled]:
    """The launches of cases whose name matches ``keyword``, as they are compiled.

    ``triton`` is a folder that another version was installed into, by ``pip install --target``; the
    one of this environment if None. ``RuntimeError`` with what the process said if it fails.
    """
    return map(from_line, _lines(triton, arch, keyword, arch=arch))


def model(arch: str, keyword: str = "", triton: Path | None = None) -> Iterator[str]:
    """Lines of text of each hot kernel of a step of the full model beside its floor."""
    return _lines(triton, "--model", arch, keyword, arch=arch)


def _lines(triton: Path | None, *arguments: str, arch: str) -> Iterator[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if triton is not None:
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join((str(triton), *([path] if path else ())))
    command = [sys.executable, "-m", "ml4core_rocm.aot_child", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            yield line.rstrip("\n")
        said = process.stderr.read()
    if process.returncode:
        last = said.strip().splitlines()[-12:]
        raise RuntimeError(f"compiling for {arch} failed:\n" + "\n".join(last))


def from_line(line: str) -> Compiled:
    facts = json.loads(line)
    return Compiled(**facts | {name: tuple(facts[name]) for name in ("matrix", "fp8")})
