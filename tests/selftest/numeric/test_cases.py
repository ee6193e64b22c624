"""The suite's own inputs and oracle: complete, and equal to written-down numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ml4core.api import OPS, SSMaxSpec, Weight
from ml4core_conformance.cases import all_cases, cases_of
from ml4core_conformance.cases.lint import lint
from ml4core_conformance.draw import Draw
from ml4core_conformance.op_inputs import ACTIVATIONS, integers, quantized
from ml4core_conformance.oracle import oracle, oracles
from ml4core_conformance.oracle.activations import quantize_activation
from ml4core_conformance.oracle.numbers import decode_weight
from ml4core_conformance.oracle.sampling import accepted

MINE = (
    "embed",
    "rms_norm",
    "layer_norm",
    "all_reduce_rms_norm",
    "rope",
    "ssmax",
    "gemm",
    "head_gemm",
    "silu_mul",
    "router",
    "moe_experts",
    "quantize",
    "sample",
    "verify_draft",
)


def said(
    op: str, args: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What the oracle says of results, by name."""
    return dict(oracle(op)(options or {}, args).results)


@pytest.mark.parametrize("op", MINE)
def test_every_corner_of_the_contract_is_shown(op: str) -> None:
    assert lint(op, cases_of(op)) == ()
    assert op in oracles()


def test_a_set_of_cases_without_a_corner_is_found() -> None:
    cases = tuple(case for case in cases_of("router") if case.name != "ties")
    assert lint("router", cases) == ("router: no case shows the corner 'ties'",)


def test_every_variant_has_a_small_case() -> None:
    variants = {(case.op, case.variant) for case in all_cases() if case.op in MINE}
    small = {(case.op, case.variant) for case in all_cases() if case.small}
    assert variants <= small


def test_the_same_seed_gives_the_same_arguments() -> None:
    case = cases_of("gemm", "bf16+bf16")[0]
    first, second, other = (case.arguments(seed)["x"] for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4"])
def test_weights_of_whole_numbers_are_whole(format: str) -> None:
    weight = integers(format, Draw(0), 3, 40, 64)
    values = decode_weight(weight)
    assert values.shape == weight.shape == (3, 40, 64)
    assert set(values.abs().unique().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0, 6.0}


def test_the_halves_of_an_nvfp4_weight_have_other_global_scales() -> None:
    weight = quantized("nvfp4", Draw(0).normal(2, 8, 32))
    scales = weight.parts["global_scale"]
    assert torch.equal(scales[:, 4:], 0.375 * scales[:, :4])


@pytest.mark.parametrize(
    ("spec", "factors"),
    [
        (SSMaxSpec("llama4"), (1.0, 1.0, 1.0693, 1.1099, 1.2197)),
        (SSMaxSpec("none"), (1.0,) * 5),
        (SSMaxSpec("log", scale=0.5), (0.0, 4.5054, 4.5055, 4.8521, 5.5452)),
    ],
)
def test_factors_by_position(spec: SSMaxSpec, factors: tuple[float, ...]) -> None:
    positions = torch.tensor([0, 8191, 8192, 16384, 65536])
    args = {"x": torch.ones(5, 1, 1), "positions": positions, "spec": spec}
    want = said("ssmax", args)["out"]
    assert want.value.flatten().tolist() == pytest.approx(factors, abs=6e-5)


def test_router_weights_of_negative_logits() -> None:
    case = next(case for case in cases_of("router", "bf16") if case.name == "negative")
    want = said("router", case.arguments(0), case.options)
    assert want["ids"].value[0].tolist() == [0, 1, 2, 3]
    weights = want["weights"].value[0].tolist()
    assert weights == pytest.approx([0.2887, 0.2612, 0.2363, 0.2138], abs=6e-5)


def test_rotation_sends_the_first_lane_to_its_partner() -> None:
    x = torch.zeros(1, 1, 64)
    x[..., 0] = 1
    for interleaved, partner in ((True, 1), (False, 32)):
        args = {
            "x": x,
            "positions": torch.tensor([1]),
            "inv_freq": torch.ones(32),
            "interleaved": interleaved,
            "magnitude": 1.0,
        }
        value = said("rope", args)["out"].value.flatten()
        assert value.nonzero().flatten().tolist() == [0, partner]
        assert value[partner].item() == pytest.approx(math.sin(1))


def test_a_group_of_seven_by_both_rules() -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = 7
    for rule, byte, back in (("floor", 127, 6.0), ("roundup", 128, 8.0)):
        want = said("quantize", {"x": x, "format": "mxfp4", "rule": rule})
        parts = {name.partition(".")[2]: one.value for name, one in want.items()}
        assert parts["scale"].tolist() == [[byte]]
        assert decode_weight(Weight("mxfp4", (1, 32), parts))[0, 0] == back


def test_an_empty_nvfp4_block_stays_zero() -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = 0.9
    want = said("quantize", {"x": x, "format": "nvfp4", "rule": None})
    parts = {name.partition(".")[2]: one.value for name, one in want.items()}
    assert int(parts["scale"].max()) <= 0x7E
    assert decode_weight(Weight("nvfp4", (1, 32), parts))[0, 16:].tolist() == [0.0] * 16


def test_more_drafts_of_a_block_are_accepted() -> None:
    target = [torch.tensor(row, dtype=torch.float64) for row in ([1 / 3, 2 / 3],) * 3]
    drafted = [torch.tensor(row, dtype=torch.float64) for row in ([2 / 3, 1 / 3],) * 2]
    places = torch.arange(3).double()
    one_by_one, block = (accepted(target, drafted, block) for block in (False, True))
    assert one_by_one.sum() == pytest.approx(1.0)
    assert block.sum() == pytest.approx(1.0)
    assert float(one_by_one @ places) == pytest.approx(10 / 9)
    assert float(block @ places) == pytest.approx(11 / 9)


@pytest.mark.parametrize("format", ["fp8_block", "fp8_tensor", "mxfp4", "nvfp4"])
def test_a_quantised_activation_is_within_half_a_step(format: str) -> None:
    x = Draw(3).normal(5, 256).double()
    found = quantize_activation(x, format)
    inside = (x - found.value).abs() <= found.step / 2 * (1 + 1e-6)
    clipped = x.abs() > 6 * found.step if format == "mxfp4" else torch.zeros_like(inside)
    assert (inside | clipped).all()
    assert found.near.double().mean() < 0.01
    assert not np.isnan(found.value.numpy()).any()


def test_every_op_is_judged_with_each_activation() -> None:
    for op in MINE:
        starts = {case.variant.rpartition("+")[2] for case in cases_of(op)}
        assert set(ACTIVATIONS) <= starts, op
        assert OPS[op].since == 1
