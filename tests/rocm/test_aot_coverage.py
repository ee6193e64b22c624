"""Every kernel that the backend launches is compiled ahead, for each architecture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("aot_coverage_child.py")
HINT = "works: a case of ml4core_rocm.aot_cases or aot_product_cases that launches it"


def uncovered(left_out: str = "") -> dict[str, list[str]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(CHILD), left_out], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["functions"] > 50
    found: dict[str, list[str]] = told["uncovered"]
    assert sorted(found) == ["gfx942", "gfx950"]
    return found


def test_no_kernel_is_left_out() -> None:
    assert uncovered() == {"gfx942": [], "gfx950": []}, HINT


@pytest.mark.parametrize(
    ("left_out", "names"),
    [
        ("^without_nan", ["ml4core_rocm.kernels.aiter_topk.nan_kernel"]),
        # With a kernel goes what it alone inlines.
        (
            "^moe_experts a[48]w4",
            [
                f"ml4core_rocm.kernels.activations.{name}"
                for name in ("_exponent_of", "_group_kernel", "_power_below", "_values")
            ],
        ),
    ],
)
def test_a_kernel_without_a_case_is_told(left_out: str, names: list[str]) -> None:
    for found in uncovered(left_out).values():
        assert found == names
