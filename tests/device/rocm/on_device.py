"""The rocm backend's kernels on a GPU that is none of AMD's: their sources, compiled for it.

    python tests/device/rocm/on_device.py --out DIR [--budget-s SECONDS] [--jobs N] [more words]

Runs the suite's ops and layouts profiles into ``DIR/rocm-source.json``, on a device of kind
``source``; more words go to ``ml4 conformance run``. It says what the sources compute, and nothing
of what is compiled of them for gfx950. A run that is out of time is interrupted, and what it found
until then is kept. Needs no installation.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROJECTS = (".", "backends/triton", "backends/rocm", "conformance")
PROFILES = ("ops", "layouts")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=345.0)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--device", default="source", help="another kind, to try this out without")
    options, words = parser.parse_known_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    out, name = options.out.resolve(), f"rocm-{options.device}"
    command = [sys.executable, "-m", "ml4core", "conformance", "run", "--backend", "rocm"]
    command += ["--device", options.device, "--jobs", str(options.jobs)]
    for profile in PROFILES:
        command += ["--profile", profile]
    command += ["--json", str(out / f"{name}.json"), "--junit", str(out / f"{name}.xml"), *words]
    shared = neighbour()
    with shared.installed(PROJECTS) as environment:
        code: int = shared.run(name, command, out, environment, options.budget_s)
    return code


def neighbour() -> Any:
    """The script for NVIDIA's GPUs, whose way of starting things is this one's too."""
    file = ROOT / "tests/device/cuda/on_device.py"
    spec = importlib.util.spec_from_file_location("ml4core_on_cuda", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
