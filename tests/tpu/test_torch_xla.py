"""The ops on torch-xla, on the host, in an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.torch_xla import environment

ROOT = Path(__file__).resolve().parents[2]
OPS = 11
FOLDER = Path(os.environ.get("ML4_TORCH_XLA_ENV", ROOT / ".venv-torch-xla"))


@pytest.fixture(scope="module")
def python() -> Path:
    """Made once, in minutes, and kept. Where it can't be made: skipped, but not in CI."""
    if sys.version_info[:2] > (3, 13) or shutil.which("gcc") is None:
        pytest.skip("torch-xla 2.9.0 has wheels up to Python 3.13, and its stand-ins need gcc")
    try:
        return environment.ensure(FOLDER)
    except (subprocess.CalledProcessError, OSError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the environment of torch-xla can't be made here: {error}")


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(900)
def test_ops_of_lazy_tensors(python: Path) -> None:
    """The same JAX programs within torch-xla's graphs, by value beside the CPU kernels."""
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("xla_child.py"))],
        env=os.environ | {"PJRT_DEVICE": "CPU", "TPU_SKIP_MDS_QUERY": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == OPS
    for one in found:
        assert one["same_shape"], one
        assert one["error"] < 1e-4, one
