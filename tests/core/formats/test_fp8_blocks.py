"""FP8 weights, activations and tensors against a loop over blocks in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ml4core.formats import e4m3, fp8_block, fp8_shards, fp8_tensor

QUANT_MAX = {"e4m3fn": 448, "e4m3fnuz": 224}
flavours = pytest.mark.parametrize("flavour", list(QUANT_MAX))
SHAPES = [(1, 1), (5, 130), (130, 5), (128, 128), (129, 257), (3, 576)]


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())


def judge_block(exact, block: np.ndarray, flavour: str, pow2: bool) -> tuple[float, list[int]]:
    """Scale and bytes of one block, in numpy float32 and fractions."""
    finite = np.abs(block[np.isfinite(block)])
    amax = max(np.float32(1e-10), finite.max() if finite.size else np.float32(0))
    limit = QUANT_MAX[flavour]
    if pow2:
        exponent = exact.least_exponent(exact.of(float(amax)), Fraction(limit))
        scale = np.float32(2.0**exponent)
    else:
        scale = np.float32(amax) / np.float32(limit)
    with np.errstate(over="ignore"):
        scaled = [float(np.float32(v) / scale) for v in block.flatten()]
    return float(scale), [exact.encode_e4m3(exact.of(v), flavour) for v in scaled]


@flavours
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_weight_blocks(exact, flavour, pow2, shape):
    w = weight(*shape)
    code, scale = fp8_block.quantize_weight(w, flavour, pow2)
    assert code.dtype == torch.uint8
    assert scale.dtype == torch.float32
    assert code.shape == shape
    assert tuple(scale.shape) == fp8_block.scale_shape(*shape)
    back = fp8_block.dequantize_weight(code, scale, flavour)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            here = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            expected, codes = judge_block(exact, w[here].numpy(), flavour, pow2)
            assert scale[row, column].item() == expected
            assert code[here].flatten().tolist() == codes
            values = [np.float32(float(exact.e4m3[flavour][c])) for c in codes if c != 0x80]
            got = back[here].flatten()[code[here].flatten() != 0x80]
            assert got.tolist() == [float(v * np.float32(expected)) for v in values]


def test_576_rows_have_five_rows_of_scales():
    w = torch.ones(576, 256)
    w[512:] = 8.0
    code, scale = fp8_block.quantize_weight(w)
    assert scale.shape == (5, 2)
    assert torch.equal(fp8_block.dequantize_weight(code, scale)[512:], w[512:])
    with pytest.raises(ValueError, match=r"\[576, 256\].* needs scales \[5, 2\], got \[4, 2\]"):
        fp8_block.dequantize_weight(code, scale[:4])


def test_experts_are_quantised_apart():
    w = weight(3, 200, 140)
    code, scale = fp8_block.quantize_weight(w)
    assert scale.shape == (3, 2, 2)
    for expert in range(3):
        one_code, one_scale = fp8_block.quantize_weight(w[expert])
        assert torch.equal(code[expert], one_code)
        assert torch.equal(scale[expert], one_scale)
    back = fp8_block.dequantize_weight(code, scale, dtype=torch.bfloat16)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back, fp8_block.dequantize_weight(code, scale).to(torch.bfloat16))


@flavours
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("width", [1, 127, 128, 200, 576])
def test_activation_rows(exact, flavour, pow2, width):
    x = weight(2, 2, width).to(torch.bfloat16)
    code, scale = fp8_block.quantize_activation(x, flavour, pow2)
    assert scale.shape == (2, 2, math.ceil(width / 128))
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for block in range(scale.shape[-1]):
            here = slice(block * 128, block * 128 + 128)
            row = x[i, j, here].float().numpy()
            expected, codes = judge_block(exact, row, flavour, pow2)
            assert scale[i, j, block].item() == expected
            assert code[i, j, here].tolist() == codes
    back = fp8_block.dequantize_activation(code, scale, flavour)
    assert torch.equal(back[..., 0], e4m3.decode(code[..., 0], flavour) * scale[..., 0])
    with pytest.raises(ValueError, match=f"needs {scale.shape[-1]} scales a row, got 9"):
        fp8_block.dequantize_activation(code, torch.ones(2, 2, 9), flavour)


@flavours
@pytest.mark.parametrize("pow2", [False, True])
def test_what_is_not_finite_does_not_count_for_the_scale(flavour, pow2):
    x = torch.full((1, 128), 0.5)
    clean = fp8_block.quantize_activation(x, flavour, pow2)
    x[0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    code, scale = fp8_block.quantize_activation(x, flavour, pow2)
    assert torch.equal(scale, clean[1])
    largest = e4m3.flavour_of(flavour).max
    got = e4m3.decode(code, flavour)
    assert got[0, :2].tolist() == [largest, -largest]
    assert got[0, 2].isnan()
    assert torch.equal(code[0, 3:], clean[0][0, 3:])


@flavours
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("fill", [0.0, -0.0, math.nan])
def test_an_empty_block_has_a_usable_scale(flavour, pow2, fill):
    code, scale = fp8_block.quantize_weight(torch.full((4, 130), fill), flavour, pow2)
    assert (scale > 0).all()
    assert scale.isfinite().all()
    back = fp8_block.dequantize_weight(code, scale, flavour)
    assert back.isnan().all() if math.isnan(fill) else (back == 0).all()


@given(
    bits=st.lists(st.integers(0, 0x7F7FFFFF), min_size=1, max_size=128),
    signs=st.integers(0, (1 << 128) - 1),
    pow2=st.booleans(),
)
def test_any_activation_row(exact, from_bits, bits, signs, pow2):
    x = from_bits([b | ((signs >> i & 1) << 31) for i, b in enumerate(bits)])
    code, scale = fp8_block.quantize_activation(x, "e4m3fn", pow2)
    expected, codes = judge_block(exact, x.numpy(), "e4m3fn", pow2)
    assert scale.item() == expected
    assert code.tolist() == codes


def test_weights_become_fnuz_without_loss():
    w = weight(130, 140)
    w[0, 0] = -0.0
    code, scale = fp8_block.quantize_weight(w)
    assert 0x80 in code
    fnuz_code, fnuz_scale = fp8_block.weight_to_fnuz(code, scale)
    assert 0x80 not in fnuz_code
    assert torch.equal(
        fp8_block.dequantize_weight(fnuz_code, fnuz_scale, "e4m3fnuz"),
        fp8_block.dequantize_weight(code, scale),
    )


@pytest.mark.parametrize(
    ("parts", "rows"), [([320, 320], 6), ([96] * 4, 4), ([448, 96, 96], 6), ([6144, 576], 53)]
)
def test_scale_rows_of_parts_are_the_sum_of_the_ceilings(parts, rows):
    """B040"""
    assert fp8_shards.scale_rows(parts) == rows


def test_stacking_keeps_each_part():
    parts = [weight(256, 130, seed=1), weight(128, 130, seed=2), weight(64, 130, seed=3)]
    quantised = [fp8_block.quantize_weight(p) for p in parts]
    code, scale = fp8_shards.stack_rows(quantised)
    assert scale.shape == (4, 2)
    expected = torch.cat([fp8_block.dequantize_weight(c, s) for c, s in quantised])
    assert torch.equal(fp8_block.dequantize_weight(code, scale), expected)
    with pytest.raises(ValueError, match="part 1 of 3 has 64 rows, not a multiple of 128"):
        fp8_shards.stack_rows([quantised[0], quantised[2], quantised[1]])


def test_shards_keep_their_scales():
    w = weight(768, 130)
    code, scale = fp8_block.quantize_weight(w)
    whole = fp8_block.dequantize_weight(code, scale)
    for world in (1, 2, 3, 6):
        shards = [fp8_shards.row_shard(code, scale, rank, world) for rank in range(world)]
        assert torch.equal(torch.cat([fp8_block.dequantize_weight(*s) for s in shards]), whole)
    with pytest.raises(ValueError, match=r"192 rows each.*shards that work: \[1, 2, 3, 6\]"):
        fp8_shards.row_shard(code, scale, 0, 4)
    with pytest.raises(ValueError, match=r"768 rows over 7 shards"):
        fp8_shards.row_shard(code, scale, 0, 7)
    with pytest.raises(ValueError, match=r"rows 192\.\.384 of 768"):
        fp8_shards.slice_rows(code, scale, 192, 384)


@flavours
def test_one_scale_for_a_tensor(exact, flavour):
    x = weight(3, 50)
    x[1, 7] = math.inf
    code, scale = fp8_tensor.quantize(x, flavour)
    expected, codes = judge_block(exact, x.numpy(), flavour, False)
    assert scale.shape == ()
    assert scale.item() == expected
    assert code.flatten().tolist() == codes
    given_code, given_scale = fp8_tensor.quantize(x, flavour, 0.3)
    assert given_scale.dtype == torch.float32
    assert torch.equal(given_code, e4m3.encode(x / torch.tensor(0.3), flavour))
    back = fp8_tensor.dequantize(given_code, 0.3, flavour, torch.bfloat16)
    value = e4m3.decode(given_code, flavour) * torch.tensor(0.3)
    assert torch.equal(back, value.to(torch.bfloat16))


def test_fused_parts_share_the_largest_scale():
    """Every byte of the part with the largest scale stays, the other part is rounded once more."""
    code = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(2, 128)
    code[1, 127] = 0x7F
    for large in (1.0, 0.3, 7e-5):
        small = torch.tensor(large / 3)
        fused, scale = fp8_tensor.fuse([(code, small), (code, torch.tensor(large))])
        assert scale.item() == torch.tensor(large).item()
        assert torch.equal(fused[2:], code)
        anew = e4m3.encode(e4m3.decode(code, "e4m3fn") * small / scale, "e4m3fn")
        assert torch.equal(fused[:2], anew)
        assert not torch.equal(fused[:2], code)
