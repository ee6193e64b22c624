"""Caches, attention, scores and top-k on the suite's own cases."""

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
    "kv_write": ("fp8_ds_mla", "e4m3", "bf16", "fp32"),
    "indexer_write": ("planar_f32", "fp32"),
    "gather_kv": ("fp8_ds_mla", "e4m3", "bf16", "fp32", "planar_f32"),
    "to_slots": ("",),
    "indexer_logits": ("planar_f32", "fp32"),
    "topk": ("",),
    "sparse_mla": ("fp8_ds_mla+bf16", "e4m3+bf16", "bf16+bf16", "bf16+fp32", "fp32+bf16"),
    "window_mla": ("fp8_ds_mla+bf16", "bf16+fp32"),
    "merge_lse": ("",),
}
"""Layouts, or variants, by how their names begin."""

LARGE = {("topk", "long"), ("topk", "ties2048"), ("topk", "nan2048")}
"""Cases that are worth their second although the suite doesn't call them small."""

CASES = [
    case
    for op, starts in VARIANTS.items()
    for case in cases_of(op)
    if case.variant.startswith(starts)
    and not case.variant.startswith("e4m3fnuz")
    and (case.small or (op, case.name) in LARGE)
]


MAIN = ("fp8_ds_mla+bf16", "planar_f32+bf16")
BY_LAYOUT = {
    "indexer_logits": {"ragged", "poisoned", "strided", "negative"},
    "sparse_mla": {"lengths", "poisoned", "strided", "hostile"},
    "window_mla": {"ragged", "poisoned", "strided", "window-edge"},
}
"""Cases of how bytes are found and read. Others are of sums, which are the same code for every
layout: where it isn't the usual one they are for `make test-full`.
"""


def _marked(case: OpCase) -> Any:
    same = case.op in BY_LAYOUT and case.name not in BY_LAYOUT[case.op]
    slow = same and not case.variant.startswith(MAIN)
    return pytest.param(case, marks=[pytest.mark.slow] if slow else [], id=case.id)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_op(case: OpCase, conforms: Callable[[OpCase], None]) -> None:
    conforms(case)
