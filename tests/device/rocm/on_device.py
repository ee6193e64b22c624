"""The rocm backend's kernels on a GPU that is none of AMD's: their sources, compiled for it.

    python tests/device/rocm/on_device.py --out DIR [--part PART] [--budget-s SECONDS] [--jobs N]
        [--commit COMMIT] [more words]

Parts: ``suite`` (if none is named) runs the suite's ops and layouts profiles into
``DIR/rocm-source.json``, on a device of kind ``source``; ``kernels`` the tests of kernels that no
op of the suite calls so, into ``DIR/rocm-kernels.xml``; ``mutants`` judges whether the suite tells
the backend from wrong ones there. Several may be named; each has the budget, and more words go to
each. It says what the sources compute, and nothing of what is compiled of them for gfx950. A run
that is out of time is interrupted, and what it found until then is kept. Needs no installation.
A copy of the sources without its .git needs ``--commit``, which results then tell.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROJECTS = (".", "backends/triton", "backends/rocm", "conformance")
PROFILES = ("--profile", "ops", "--profile", "layouts")
PARTS = ("suite", "kernels", "mutants")
KERNELS = "tests/rocm/kernels"
NOT_FOR_DEVICES = ("test_scaled_dot.py", "test_interpreter.py")
"""Of these tests: what the interpreter does."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--budget-s", type=float, default=345.0)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--commit", default="", help="of a copy that has no .git: 40 hex digits")
    parser.add_argument("--device", default="source", help="another kind, to try this out without")
    options, words = parser.parse_known_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.commit:
        os.environ["ML4_SOURCE_COMMIT"] = options.commit
    shared, codes = neighbour(), []
    with shared.installed(PROJECTS) as environment:
        for part in options.part or ["suite"]:
            name, command = told(part, options.out.resolve(), options.device, options.jobs)
            command = [sys.executable, "-m", *command, *words]
            codes.append(shared.run(name, command, options.out, environment, options.budget_s))
    return max(codes)


def told(part: str, out: Path, device: str, jobs: int) -> tuple[str, list[str]]:
    """The name of a part's results, and the words of its command."""
    suite = ["ml4core", "conformance"]
    judged = ["--backend", "rocm", "--device", device, "--jobs", str(jobs), *PROFILES]
    if part == "suite":
        name = f"rocm-{device}"
        files = ["--json", str(out / f"{name}.json"), "--junit", str(out / f"{name}.xml")]
        return name, [*suite, "run", *judged, *files]
    if part == "mutants":
        return "rocm-mutants", [*suite, "selftest", *judged]
    left_out = [f"--ignore={KERNELS}/{name}" for name in NOT_FOR_DEVICES]
    report = f"--junitxml={out / 'rocm-kernels.xml'}"
    return "rocm-kernels", ["pytest", "-q", report, "-p", "no:cacheprovider", *left_out, KERNELS]


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
