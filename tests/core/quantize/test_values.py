"""Scales of empty and extreme groups, scale rules, and values that no format can hold."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.formats import fp8_block, mxfp4, mxfp4_bf16, nvfp4
from ml4core.models.errors import CheckpointError
from ml4core.models.quantize import QuantizeOptions, quantize

NAME = "layers.1.experts.0.w2"


def log2_floor(value: Fraction) -> int:
    exponent = 0
    while value >= 2:
        value, exponent = value / 2, exponent + 1
    while value < 1:
        value, exponent = value * 2, exponent - 1
    return exponent


def log2_ceil(value: Fraction) -> int:
    floor = log2_floor(value)
    return floor if value == Fraction(2) ** floor else floor + 1


def exponent_of(rule: str, amax: Fraction) -> int:
    """The rules as they are written down, in exact arithmetic."""
    floor = log2_floor(amax)
    return {
        "floor": floor - 2,
        "even": floor - 2 + (amax >= Fraction(7, 4) * Fraction(2) ** floor),
        "roundup": log2_ceil(amax / 6),
        "ceil": log2_ceil(amax) - 2,
    }[rule]


@pytest.mark.parametrize("rule", mxfp4.RULES)
def test_scale_rules(make: Any, convert: Any, tensors_of: Any, rule: str) -> None:
    """B038: 4.0 to 8.0 in steps of 1/16, times powers of two; amax 7 is 6, 8, 8 and 8 again."""
    sweep = [
        Fraction(n, 16) * Fraction(2) ** shift for shift in (-9, -3, 0, 5) for n in range(64, 129)
    ]
    rows = torch.full((len(sweep), 32), 0.001, dtype=torch.bfloat16)
    rows[:, 7] = torch.tensor([float(value) for value in sweep])
    result = tensors_of(convert(make({f"{NAME}.weight": rows}), to="mxfp4", mxfp4_rule=rule))
    scale = result[f"{NAME}.weight_scale"]
    assert scale.flatten().tolist() == [127 + exponent_of(rule, value) for value in sweep]
    values = mxfp4.dequantize(result[f"{NAME}.weight"], scale)
    seven = values[130 + sweep[130:].index(Fraction(7)), 7]
    assert float(seven) == (6.0 if rule == "floor" else 8.0)


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_an_empty_block_in_nvfp4(make: Any, convert: Any, tensors_of: Any, form: str) -> None:
    """B032: a placeholder scale of 1 would become 448 / (0.9 / 6), then NaN."""
    weight = torch.zeros(4, 32, dtype=torch.bfloat16)
    weight[0, 20] = 0.9
    weight[2, 3] = -1e-30
    result = convert(make({f"{NAME}.weight": weight}), to="nvfp4", nvfp4_form=form)
    scale = tensors_of(result)[f"{NAME}.weight_scale"]
    assert int(scale.view(torch.uint8).max()) <= 0x7E
    assert scale.float().isfinite().all()
    values = tensors_of(convert(result, name="back", to="bf16"))[f"{NAME}.weight"]
    assert float(values[0, 20]) == pytest.approx(0.9, rel=0.01)
    values[0, 20] = 0
    assert not values.any()


@pytest.mark.parametrize("to", ["fp8_block", "nvfp4", "mxfp4"])
def test_an_empty_matrix(make: Any, convert: Any, tensors_of: Any, to: str) -> None:
    source = make({f"{NAME}.weight": torch.zeros(130, 160, dtype=torch.bfloat16)})
    middle = convert(source, name="middle", to=to)
    for name, tensor in tensors_of(middle).items():
        assert tensor.float().isfinite().all(), name
        if tensor.dtype == torch.uint8:
            assert not (tensor == 0xFF).any()
    back = tensors_of(convert(middle, to="bf16"))[f"{NAME}.weight"]
    assert back.shape == (130, 160)
    assert not back.any()


def bf16_of(bits: Tensor) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("rule", mxfp4.RULES)
def test_integers_give_the_same_mxfp4(rule: str) -> None:
    """All fractions of the largest value at all exponents, among values near it and anywhere."""
    generator = torch.Generator().manual_seed(7)
    for exponent in range(255):
        amax = (exponent << 7) + torch.arange(128).unsqueeze(1)
        near = amax - torch.randint(0, 6 << 7, (128, 24), generator=generator)
        bits = torch.cat((amax, near, amax * torch.rand(128, 7, generator=generator)), 1)
        bits = bits.clamp(min=0).to(torch.int32)
        x = bf16_of(bits | (torch.randint(0, 2, bits.shape, generator=generator) << 15))
        for got, wanted in zip(mxfp4_bf16.quantize(x, rule), mxfp4.quantize(x, rule), strict=True):
            assert torch.equal(got, wanted), exponent


def test_integers_at_every_value() -> None:
    """Every finite bfloat16, behind a largest value of 7.0."""
    every = bf16_of(torch.arange(65536, dtype=torch.int32))
    every = every[every.abs() <= 7.0]
    x = torch.full((len(every), 32), 7.0, dtype=torch.bfloat16)
    x[:, 1] = every
    for rule in mxfp4.RULES:
        for got, wanted in zip(mxfp4_bf16.quantize(x, rule), mxfp4.quantize(x, rule), strict=True):
            assert torch.equal(got, wanted)
    with pytest.raises(TypeError, match="float32"):
        mxfp4_bf16.quantize(x.float())
    with pytest.raises(ValueError, match="pad it to 64"):
        mxfp4_bf16.quantize(x[:, :31].repeat(1, 2)[:, :33])


def refused(source: Path, tmp_path: Path, **options: Any) -> str:
    """The error's text, and nothing is left."""
    with pytest.raises(CheckpointError) as error:
        quantize(source, tmp_path / "t", QuantizeOptions(**options))
    assert not [name for name in os.listdir(tmp_path) if name.startswith("t")]
    return str(error.value)


@pytest.mark.parametrize("to", ["bf16", "fp8_block", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_that_are_not_finite(make: Any, tmp_path: Path, to: str, dtype: torch.dtype) -> None:
    weight = torch.randn(20_000, 128).to(dtype)
    weight[300, 5] = weight[19_999, 9] = float("nan")
    weight[301, 0] = float("-inf")
    text = refused(make({f"{NAME}.weight": weight}), tmp_path, to=to)
    assert f"{NAME}.weight: 2 NaN and 1 infinite values, the first in row 300" in text


def test_values_that_are_only_copied(make: Any, tmp_path: Path) -> None:
    norm = torch.ones(64)
    norm[3] = float("inf")
    text = refused(make({"norm.weight": norm}), tmp_path, to="mxfp4")
    assert "norm.weight: 1 infinite values, the first in row 3" in text


def test_values_beyond_bf16(make: Any, tmp_path: Path) -> None:
    weight = torch.zeros(2, 32)
    weight[1, 1] = 3.4e38
    text = refused(make({f"{NAME}.weight": weight}), tmp_path, to="bf16")
    assert "1 infinite values once rounded to bf16, the first in row 1" in text


@pytest.mark.parametrize("to", ["bf16", "fp8_block", "mxfp4"])
def test_nan_codes_of_fp8(make: Any, tmp_path: Path, to: str) -> None:
    code = torch.zeros(300, 64, dtype=torch.uint8)
    code[290, 1] = 0xFF
    tensors = {
        f"{NAME}.weight": code.view(torch.float8_e4m3fn),
        f"{NAME}.weight_scale": torch.ones(3, 1),
    }
    text = refused(make(tensors), tmp_path, to=to)
    assert f"{NAME}.weight: 1 NaN values, the first in row 290" in text


@pytest.mark.parametrize("to", ["bf16", "fp8_block"])
def test_scales_of_fp8(make: Any, tmp_path: Path, to: str) -> None:
    code, scale = fp8_block.quantize_weight(torch.randn(300, 200))
    scale[2, 1] = float("nan")
    tensors = {f"{NAME}.weight": code.view(torch.float8_e4m3fn), f"{NAME}.weight_scale": scale}
    text = refused(make(tensors), tmp_path, to=to)
    assert f"{NAME}.weight_scale" in text
    assert "row 2" in text


@pytest.mark.parametrize("to", ["bf16", "nvfp4", "mxfp4"])
def test_a_nan_scale_byte_in_nvfp4(make: Any, tmp_path: Path, to: str) -> None:
    """B032: read, whether it would be decoded or copied."""
    packed, scale = nvfp4.quantize(torch.randn(40, 64), divisor=torch.tensor(900.0))
    scale[33, 2] = 0x7F
    tensors = {
        f"{NAME}.weight_packed": packed,
        f"{NAME}.weight_scale": scale.view(torch.float8_e4m3fn),
        f"{NAME}.weight_global_scale": torch.tensor([900.0]),
    }
    text = refused(make(tensors), tmp_path, to=to)
    assert f"{NAME}.weight_scale: the scale of row 33, block 2 is the byte 0x7F" in text


@pytest.mark.parametrize("to", ["bf16", "nvfp4", "mxfp4"])
def test_a_nan_scale_byte_in_mxfp4(make: Any, tmp_path: Path, to: str) -> None:
    packed, scale = mxfp4.quantize(torch.randn(40, 64))
    scale[39, 1] = 0xFF
    source = make({f"{NAME}.weight": packed, f"{NAME}.weight_scale": scale})
    text = refused(source, tmp_path, to=to)
    assert f"{NAME}.weight_scale: the scale of row 39, block 1 is the byte 0xFF" in text


def test_matrices_that_do_not_fit_are_all_named(make: Any, tmp_path: Path) -> None:
    tensors = {f"layers.1.experts.{n}.w1.weight": torch.randn(32, 40) for n in range(3)}
    tensors["layers.1.experts.3.w2.weight"] = torch.zeros(4, 4, 4)
    tensors["layers.1.experts.4.w2.weight"] = torch.zeros(4, 32, dtype=torch.int32)
    tensors["layers.1.experts.5.w2.weight"] = torch.zeros(4, 32).to(torch.float8_e4m3fn)
    tensors["layers.2.experts.gate_up_proj"] = torch.zeros(2, 64, 32)
    text = refused(make(tensors), tmp_path, to="mxfp4")
    assert "7 matrices can't be converted to mxfp4" in text
    for n in range(3):
        assert f"layers.1.experts.{n}.w1.weight: 40 columns, not a multiple of 32" in text
    assert "shape [4, 4, 4]" in text
    assert "dtype I32" in text
    assert "layers.1.experts.5.w2.weight_scale" in text
    assert "layers.2.experts.gate_up_proj: shape [2, 64, 32]" in text


def test_forms_that_are_not_read_are_copied_where_they_stay(
    make: Any, convert: Any, tensors_of: Any
) -> None:
    tensors = {"layers.0.attention.wo.weight": torch.zeros(4, 32, dtype=torch.int32)}
    tensors[f"{NAME}.weight"] = torch.randn(4, 32)
    result = tensors_of(convert(make(tensors), to="mxfp4"))
    assert result["layers.0.attention.wo.weight"].dtype == torch.int32
    assert result[f"{NAME}.weight"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "int8"}, "to 'int8'; known are bf16, fp8_block, nvfp4, mxfp4"),
        ({"to": "mxfp4", "mxfp4_rule": "up"}, "mxfp4_rule 'up'; known are even"),
        ({"to": "nvfp4", "nvfp4_form": "ct"}, "nvfp4_form 'ct'; known are compressed-tensors"),
        ({"to": "bf16", "rest": "fp8_block"}, "leaves no rest"),
        ({"to": "mxfp4", "parts": "some"}, "parts 'some'"),
        ({"to": "mxfp4", "max_shard_bytes": 0}, "max_shard_bytes is 0"),
    ],
)
def test_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QuantizeOptions(**options)
