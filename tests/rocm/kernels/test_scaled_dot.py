"""Products with scales in the matrix units, as the interpreter of another triton computes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RELEASE = "3.9.0"
"""The interpreter has ``tl.dot_scaled`` from 3.8 on; before, operands are decoded in its place."""


@pytest.mark.slow
@pytest.mark.network
def test_scaled_products_are_those_of_decoded_operands(tmp_path: Path) -> None:
    install = ["install", "--quiet", "--no-deps", "--target", str(tmp_path), f"triton=={RELEASE}"]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    settings = {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    products = Path(__file__).with_name("test_products.py")
    words = ["-q", "-k", "scales or (gemm and mxfp4)", "-p", "no:cacheprovider", str(products)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
