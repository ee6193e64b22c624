"""Makes the side environment in which torch-xla runs on the host.

    python -m tools.torch_xla.environment FOLDER

torch-xla 2.9.0 is bound to torch 2.9, whose only x86-64 wheel on PyPI is built for CUDA. It is
installed without CUDA's libraries, and ``stand_ins`` takes their place: 1.3 GB to download and 3.4
on disk, instead of 4.1 and 7.1. ml4core and its siblings come without their own dependencies, as
ml4core asks for a newer torch.

A folder that is complete is left as it is; one that was broken off is made anew.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOUND = ("torch==2.9.1", "torch-xla==2.9.0")
"""Without their dependencies."""
WITH = (
    *("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec"),  # torch's
    *("absl-py", "pyyaml", "requests"),  # torch-xla's
    *("jax==0.10.2", "libtpu==0.0.42.1"),
    *("numpy", "pluggy", "pydantic", "rich", "safetensors", "typer"),  # ml4core's
    *("setuptools>=77", "pytest"),
)
OURS = (".", "backends/tpu", "conformance")
_STAMP = "complete"


def ensure(folder: Path) -> Path:
    """The environment's Python, made if it isn't there; ``CalledProcessError`` if that fails."""
    python = folder / "bin" / "python"
    if (folder / _STAMP).exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    _pip(python, "--no-deps", *BOUND)
    _pip(python, *WITH)
    editable = [word for name in OURS for word in ("-e", str(ROOT / name))]
    _pip(python, "--no-deps", "--no-build-isolation", *editable)
    # Not imported: it can't be yet.
    torch = next(folder.glob("lib/python3*/site-packages/torch"))
    stand_ins = Path(__file__).with_name("stand_ins.py")
    subprocess.run([str(python), str(stand_ins), str(torch)], check=True)
    check = "import torch, torch_xla; assert (torch.ones(2, device='xla') + 1).sum().item() == 4"
    subprocess.run([str(python), "-c", check], check=True, env=os.environ | {"PJRT_DEVICE": "CPU"})
    (folder / _STAMP).touch()
    return python


def _pip(python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *what]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    print(ensure(Path(sys.argv[1])))
