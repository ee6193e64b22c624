"""The suite's cases on the kernels of tiled caches, which the suite's own layouts don't reach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import pytest
import torch

from ml4core.compose.ops import COMPOSED
from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import all_cases
from ml4core_tpu.bridge import padded, to_jax, to_torch
from ml4core_tpu.kernels import moe
from ml4core_tpu.product_ops import router

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
    conforms(cases("router", "bf16")["ties"], False)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_agree_on_ties_at_the_border(dtype: torch.dtype, renormalize: bool) -> None:
    """The op, the one within a layer's program at each of two buckets, and the composed one: ids
    and weights are the same, and of equal logits the lowest ids are taken (B132).
    """
    # Logits are exact: quarters times an identity. The fourth of each row has equals.
    quarters = torch.tensor(
        [
            [3, 1, 2, 1, 1, 3, 0, 1],
            [0, 0, 0, 0, 0, 0, 0, 0],
            [-1, -2, -1, -1, -2, -1, -1, -1],
            [1, 2, 3, 4, 4, 3, 2, 1],
            [0, -0.0, 5, 0, -0.0, 5, 5, 0],
        ]
    )
    want = [[0, 5, 2, 1], [0, 1, 2, 3], [0, 2, 3, 5], [3, 4, 2, 5], [2, 5, 6, 0]]
    x, weight = (quarters / 4).to(dtype), torch.eye(8)
    options = {"topk": 4, "renormalize": renormalize, "routed_scale": 2.5}
    found = {
        "op": router(x, weight, **options),
        "composed": COMPOSED["router"](x, weight, **options),
    }
    program = jax.jit(partial(moe.router, **options))
    for bucket in (16, 64):
        both = program(to_jax(padded(x, bucket)), to_jax(weight))
        found[f"program, {bucket} rows"] = tuple(to_torch(one, len(x)) for one in both)
    for name, (weights, ids) in found.items():
        assert ids.tolist() == want, name
        torch.testing.assert_close(weights, found["op"][0], rtol=1e-6, atol=0, msg=name)
