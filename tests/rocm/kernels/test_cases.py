"""Caches, attention, scores, top-k and norms on the suite's own cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import cases_of

pytestmark = [  # what numpy says of the interpreter's ways
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

VARIANTS = {
    "kv_write": ("e4m3", "bf16", "fp32"),
    "indexer_write": ("tiled16_f32", "planar_f32", "fp32"),
    "gather_kv": ("e4m3", "bf16", "fp32", "tiled16_f32", "planar_f32"),
    "to_slots": ("",),
    "indexer_logits": ("tiled16_f32", "planar_f32", "fp32"),
    "topk": ("",),
    "sparse_mla": ("e4m3+bf16", "e4m3fnuz+bf16", "bf16+bf16", "bf16+fp32", "fp32+bf16"),
    "window_mla": ("e4m3fnuz+bf16",),
    "merge_lse": ("",),
    "layer_norm": ("",),
    "rms_norm": ("",),
    "all_reduce_rms_norm": ("",),
    "embed": ("",),
    "rope": ("",),
    "ssmax": ("",),
    "silu_mul": ("",),
}
"""Layouts, or variants, by how their names begin."""

CASES = [
    case
    for op, starts in VARIANTS.items()
    for case in cases_of(op)
    if case.variant.startswith(starts) and case.small
]


MAIN = ("e4m3+bf16", "tiled16_f32")
WIDE = {("sparse_mla", "placed"), ("sparse_mla", "heads64"), ("indexer_logits", "depths")}
"""Cases that take seconds: with layouts that aren't the usual one they are for `make test-full`."""


def _marked(case: OpCase) -> Any:
    wide = (case.op, case.name) in WIDE and not case.variant.startswith(MAIN)
    return pytest.param(case, marks=[pytest.mark.slow] if wide else [], id=case.id)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_op(case: OpCase, conforms: Callable[[OpCase], None]) -> None:
    conforms(case)
