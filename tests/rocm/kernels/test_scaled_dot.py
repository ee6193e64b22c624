"""Products with scales in the matrix units, as the interpreter of another triton computes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import other_triton

ROOT = Path(__file__).parents[3]
CHOSEN = "scales or (gemm and mxfp4) or (moe_experts and mxfp4)"
"""Of the tests of products: those of MXFP4 weights, and of a4w4 and a8w4 by a reference of theirs.
"""

# May be the first one, which makes the folder.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def triton() -> Path:
    """Where it can't be made: skipped, but not in CI."""
    named = os.environ.get("ML4_OTHER_TRITON")
    try:
        return other_triton.ensure(Path(named) if named else ROOT / ".venv" / "triton")
    except other_triton.NotMade as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no triton {other_triton.RELEASE} beside: {reason}")


def test_scaled_products_are_those_of_decoded_operands(triton: Path) -> None:
    """``tl.dot_scaled`` itself, in gemm and in experts, by tests that elsewhere decode in its
    place.
    """
    path = os.pathsep.join(filter(None, (str(triton), os.environ.get("PYTHONPATH"))))
    # Not one of this run's processes: it would wait for a turn that this test holds.
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    settings = {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    settings |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    child = Path(__file__).with_name("scaled_dot_child.py")
    words = ["-q", "-k", CHOSEN, "-m", "not slow", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, str(child), *words, str(Path(__file__).with_name("test_products.py"))],
        cwd=ROOT,
        env=others | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["triton"] == other_triton.RELEASE
    assert set(told["products"]) == {"e2m1 by e2m1", "e4m3 by e2m1"}
    assert told["kernels"] == ["gated_kernel", "outer_kernel", "tile_kernel"]
