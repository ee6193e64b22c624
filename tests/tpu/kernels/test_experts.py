"""FP8 experts by their grouped product, against the suite's oracle and their plain twin."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ml4core.api import Weight
from ml4core_conformance import compare
from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import all_cases
from ml4core_conformance.oracle import oracle
from ml4core_conformance.oracle.expected import Float
from ml4core_conformance.tolerances import tolerance
from ml4core_tpu.bridge import to_jax, to_torch
from ml4core_tpu.kernels import moe
from ml4core_tpu.kernels.fp8_experts import FP8
from ml4core_tpu.kernels.layer.form import Form, Matrix, form_of
from ml4core_tpu.kernels.layer.products import decoded, experts
from ml4core_tpu.kernels.rows import Rows


def cases(variant: str) -> dict[str, OpCase]:
    return {
        case.name: case
        for case in all_cases()
        if (case.op, case.variant) == ("moe_experts", variant)
    }


def form(act: str) -> Form:
    from ml4core_conformance import tiny

    return form_of(tiny.model().layers[1], Rows("wide", 512, 64), act=act)


def matrix(weight: Weight) -> Matrix:
    return Matrix({name: to_jax(part) for name, part in weight.parts.items()}, weight.format)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        *(("fp8_block+bf16", name) for name in ("one", "rows", "each", "lopsided", "ranks")),
        pytest.param("fp8_block+bf16", "long", marks=pytest.mark.slow),
        ("fp8_block+bf16", "weights"),
        ("fp8_block+fp32", "narrow"),
        ("fp8_tensor+bf16", "rows"),
        ("fp8_tensor+fp8_tensor", "rows"),
    ],
)
def test_a_layer_of_fp8_experts_conforms(variant: str, name: str) -> None:
    """Widths that no block divides, one row, experts without rows or of another rank (B034)."""
    case = cases(variant)[name]
    given = case.arguments(0)
    x, first = given["x"], given.get("first_expert") or 0
    out = experts(
        form(case.options.get("act", "")),
        to_jax(x),
        *(matrix(given[name]) for name in ("w13", "w2")),
        to_jax(given["weights"]),
        to_jax(given["ids"]),
        jnp.array([first], jnp.int32),
        total=given["w13"].shape[0],
    )
    found = to_torch(out, x.shape[0])
    want = oracle(case.op)(case.options, given).results["out"]
    assert isinstance(want, Float)
    bound = tolerance(case.op, case.variant, want.dtype)
    compare.anomalies("out", found, want, case.id)
    for one in (
        compare.elements("out", found, want, bound, case.id),
        *compare.structure("out", found, want, bound, case.id),
    ):
        assert one.error <= one.bound, f"{one.what} at {one.where}"


def drawn(tokens: int, count: int) -> tuple[torch.Tensor, Matrix, Matrix, torch.Tensor, np.ndarray]:
    """Rows [tokens, 160], experts of 2 x 192 rows, weights, and choices of 2 of ``count``."""
    draw = torch.Generator().manual_seed(tokens)

    def stack(rows: int, width: int) -> Matrix:
        codes = torch.randint(0, 0x70, (count, rows, width), generator=draw, dtype=torch.uint8)
        scale = torch.rand(count, -(-rows // 128), -(-width // 128), generator=draw) / width
        return Matrix({"data": to_jax(codes), "scale": to_jax(scale)}, "fp8_block")

    x = torch.randn(tokens, 160, generator=draw)
    weights = torch.rand(tokens, 2, generator=draw)
    chosen = np.stack([torch.randperm(count, generator=draw)[:2].numpy() for _ in range(tokens)])
    return x, stack(384, 160), stack(160, 192), weights, chosen.astype(np.int32)


@pytest.mark.parametrize("at_once", [16, 64])
def test_tiles_in_turn_are_as_all_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine experts of which four are here, the first of them without a row; a row of NaN."""
    x, w13, w2, weights, chosen = drawn(37, 9)
    chosen[chosen == 3] = 0
    weights[5] = float("nan")
    stacks = [
        Matrix({name: part[3:7] for name, part in one.parts.items()}, one.format)
        for one in (w13, w2)
    ]
    given = (to_jax(weights), jnp.asarray(chosen), jnp.int32(3))
    parts = [(one.data, one.parts["scale"]) for one in stacks]

    def found() -> np.ndarray:
        moe.fp8_moe.clear_cache()
        return np.asarray(moe.fp8_moe(to_jax(x), *parts, *given, target="host", total=9))

    whole = found()
    monkeypatch.setattr(moe, "_FEW_ROWS", 0)
    monkeypatch.setattr(moe, "_ROWS_AT_ONCE", at_once)
    turns = found()
    moe.fp8_moe.clear_cache()
    plain = np.asarray(moe.wide_moe(to_jax(x), *map(decoded, stacks), *given))
    broken = np.isnan(plain).any(1)
    assert broken.tolist() == [row == 5 and (3 < chosen[5].max() < 7) for row in range(37)]
    for mine in (whole, turns):
        assert np.array_equal(np.isnan(mine).any(1), broken)
        np.testing.assert_allclose(mine[~broken], plain[~broken], rtol=1e-4, atol=1e-4)


def test_no_choice_of_this_rank_gives_zeros() -> None:
    x, w13, w2, weights, chosen = drawn(5, 4)
    parts = [(one.data, one.parts["scale"]) for one in (w13, w2)]
    given = (to_jax(weights), jnp.asarray(chosen + 4), jnp.int32(0))
    found = moe.fp8_moe(to_jax(x), *parts, *given, target="host", total=8)
    assert (np.asarray(found) == 0).all()


def test_scales_that_no_blocks_have_are_refused() -> None:
    codes, scale = jnp.zeros((2, 256, 384), jnp.uint8), jnp.ones((2, 3, 2))
    with pytest.raises(ValueError, match=r"have scales \(2, 2, 3\), not \(2, 3, 2\)"):
        FP8.operands((codes, scale), 256)
