"""The suite's cases on the kernels of tiled caches, which the suite's own layouts don't reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import all_cases

Conforms = Callable[[OpCase, bool], None]

SPARSE = ("lengths", "placed", "empty", "hostile", "poisoned", "no-rope")
WIDE = ("poisoned2048", "heads64", "prefill65")


def cases(op: str, variant: str) -> dict[str, OpCase]:
    return {case.name: case for case in all_cases() if (case.op, case.variant) == (op, variant)}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_mla_of_tiles(conforms: Conforms, name: str) -> None:
    """Hostile slots, and NaN in every row that isn't selected (B014, B016, B020)."""
    conforms(cases("sparse_mla", "e4m3+bf16")[name], True)


def test_sparse_mla_of_tiles_in_fp32(conforms: Conforms) -> None:
    conforms(cases("sparse_mla", "e4m3+fp32")["hostile"], True)


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_sparse_mla_of_tiles_at_size(conforms: Conforms, name: str) -> None:
    conforms(cases("sparse_mla", "e4m3+bf16")[name], True)


@pytest.mark.parametrize("name", ["block", "verify", "window-edge", "poisoned", "padding"])
def test_window_mla_of_tiles(conforms: Conforms, name: str) -> None:
    conforms(cases("window_mla", "e4m3+bf16")[name], True)


@pytest.mark.parametrize("name", ["ragged", "negative", "poisoned", "padding", "prefill"])
def test_index_scores_along_lanes(conforms: Conforms, name: str) -> None:
    conforms(cases("indexer_logits", "planar_ue8m0x4+bf16")[name], True)


@pytest.mark.parametrize("name", ["lengths", "ties", "minus-infinity", "nan2048", "k>S"])
def test_topk(conforms: Conforms, name: str) -> None:
    """What must be chosen, of equal scores the lowest positions, and never NaN (B001, B004)."""
    conforms(cases("topk", "scores")[name], False)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_experts_of_both_fp4_formats(conforms: Conforms, format: str) -> None:
    """Groups of 16 and of 32; experts of another rank add nothing."""
    found = cases("moe_experts", f"{format}+bf16")
    for name in ("rows", "ranks"):
        conforms(found[name], False)


@pytest.mark.parametrize("format", ["fp8_block", "fp8_tensor"])
def test_products_of_fp8(conforms: Conforms, format: str) -> None:
    found = cases("gemm", f"{format}+bf16")
    for name in ("ragged", "rounded"):
        conforms(found[name], False)


def test_router(conforms: Conforms) -> None:
    """Ties go to the lowest id, whatever the kernel (B132)."""
    conforms(cases("router", "bf16")["ties"], False)
