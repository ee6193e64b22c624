"""Each bound from both sides: what is slightly wrong fails, another order of sums passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ml4core.api import Weight
from ml4core.compose.ops.moe import moe_experts
from ml4core.compose.ops.weights import decode_weight
from ml4core.formats import fp8_block, fp8_tensor, mxfp4, nvfp4
from ml4core_conformance.check import Status
from ml4core_conformance.results import CheckResult

Op = Callable[..., Any]
Dies = Callable[..., str]
Passes = Callable[..., CheckResult]
FAMILIES = ("anomalies", "elements", "structure", "bias")


def _on_first(change: Callable[[Tensor], Tensor]) -> Callable[[Op], Op]:
    """An op whose first result is changed."""

    def wrap(honest: Op) -> Op:
        def call(*args: Any) -> Any:
            found = honest(*args)
            if isinstance(found, tuple):
                return change(found[0]), *found[1:]
            return change(found)

        return call

    return wrap


gain = _on_first(lambda x: (x.double() * 1.012).to(x.dtype))


def _zero_head(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 3] = 0
    return x


def _gemm(
    product: Callable[[Tensor, Tensor], Tensor], last: Op | None = None
) -> Callable[[Op], Op]:
    """A gemm that forms its sums in fp32 by ``product`` of x [T, K] and w [N, K]."""

    def wrap(honest: Op) -> Op:
        def call(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
            found = product(x.float(), decode_weight(weight))
            return (last or Tensor.to)(found, out_dtype or x.dtype)

        return call

    return wrap


def _in_order(x: Tensor, w: Tensor, dtype: torch.dtype = torch.float32, step: int = 1) -> Tensor:
    """One product of ``step`` columns after the other, the sum kept in ``dtype``."""
    total = torch.zeros(x.shape[0], w.shape[0], dtype=dtype)
    for start in range(0, x.shape[1], step):
        part = x[:, start : start + step] @ w[:, start : start + step].T
        total = (total.float() + part).to(dtype)
    return total.float()


def _pairwise(x: Tensor, w: Tensor) -> Tensor:
    terms = x.unsqueeze(1) * w
    while terms.shape[-1] > 1:
        terms = F.pad(terms, (0, terms.shape[-1] % 2))
        terms = terms[..., 0::2] + terms[..., 1::2]
    return terms.squeeze(-1)


def _backward(x: Tensor, w: Tensor) -> Tensor:
    return _in_order(x.flip(-1), w.flip(-1))


def _tf32(x: Tensor, w: Tensor) -> Tensor:
    """Operands of 10 bits of fraction, as some matrix units use for fp32."""

    def narrow(y: Tensor) -> Tensor:
        return ((y.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    return narrow(x.contiguous()) @ narrow(w.contiguous()).T


def _toward_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return x
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype)


@pytest.mark.parametrize(
    "id", ["gemm/bf16+bf16", "rms_norm/bf16", "silu_mul/bf16", "gemm/fp32+fp32", "router/bf16"]
)
def test_a_gain_of_1_2_percent_dies(dies: Dies, id: str) -> None:
    assert "gain" in dies(f"ops.bias[{id}]", **{id.partition("/")[0]: gain})


def test_a_zeroed_head_dies_and_is_named(dies: Dies) -> None:
    for family in ("elements", "structure"):
        reason = dies(f"ops.{family}[head_gemm/bf16+bf16]", head_gemm=_on_first(_zero_head))
        assert "N 3" in reason


@pytest.mark.parametrize("step", [1, 64])
def test_sums_in_bf16_die(dies: Dies, step: int) -> None:
    gemm = _gemm(lambda x, w: _in_order(x, w, torch.bfloat16, step))
    dies("ops.elements[gemm/bf16+bf16]", gemm=gemm)
    dies("bytes.rounding[gemm/bf16+bf16]", gemm=gemm)


def test_truncation_dies(dies: Dies) -> None:
    gemm = _gemm(lambda x, w: x @ w.T, _toward_zero)
    assert "gain" in dies("ops.bias[gemm/fp8_block+bf16]", small=False, gemm=gemm)
    dies("bytes.rounding[gemm/fp8_block+bf16]", gemm=gemm)


def test_operands_of_ten_bits_die_where_fp32_is_promised(dies: Dies) -> None:
    for family in ("elements", "structure"):
        dies(f"ops.{family}[gemm/fp32+fp32]", gemm=_gemm(_tf32))


def _in_parts(count: int) -> Op:
    """A product of fp32 operands as sums of ``count`` bf16 parts each."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        split = []
        for rest in (x, w):
            parts = []
            for _ in range(count):
                parts.append(rest.bfloat16().float())
                rest = rest - parts[-1]
            split.append(parts)
        pairs = [(i, j) for i in range(count) for j in range(count - i)]
        return torch.stack([split[0][i] @ split[1][j].T for i, j in reversed(pairs)]).sum(0)

    return product


def test_fp32_products_of_three_bf16_parts_pass_and_of_two_die(dies: Dies, passes: Passes) -> None:
    id = "ops.elements[gemm/fp32+fp32]"
    passes(id, small=False, gemm=_gemm(_in_parts(3)))
    dies(id, small=False, gemm=_gemm(_in_parts(2)))


@pytest.mark.parametrize(
    "product", [_in_order, _backward, lambda x, w: _in_order(x, w, step=128), _pairwise]
)
@pytest.mark.parametrize("variant", ["fp32+fp32", "mxfp4+bf16"])
def test_another_order_of_fp32_sums_passes(passes: Passes, product: Op, variant: str) -> None:
    for family in FAMILIES:
        result = passes(f"ops.{family}[gemm/{variant}]", gemm=_gemm(product))
        if variant.startswith("fp32"):  # bf16 results are as wrong as one cast makes them
            assert max((one.ratio for one in result.measures), default=0) < 0.5
    passes(f"bytes.rounding[gemm/{variant}]", gemm=_gemm(product))


def test_an_output_in_bf16_dies_where_fp32_is_asked_for(dies: Dies) -> None:
    gemm = _gemm(lambda x, w: (x @ w.T).bfloat16().float())
    dies("ops.elements[gemm/bf16+bf16]", small=False, gemm=gemm)


def test_two_casts_of_a_norm_die(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            rate = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
            return (x.float() * rate).to(x.dtype) * weight

        return norm

    dies("ops.elements[rms_norm/bf16]", rms_norm=wrap)


def _narrow_experts(each: torch.dtype) -> Callable[[Op], Op]:
    """Experts whose inner values are bf16, as operands of a bf16 product are, and whose results are
    kept in ``each`` before the weighted sum.
    """

    def wrap(honest: Op) -> Op:
        def experts(
            x: Tensor, w13: Weight, w2: Weight, weights: Tensor, ids: Tensor, first: int = 0
        ) -> Tensor:
            up, down = decode_weight(w13), decode_weight(w2)
            out = torch.zeros(x.shape)
            for row in range(x.shape[0]):
                for choice in range(ids.shape[1]):
                    expert, share = int(ids[row, choice]) - first, weights[row, choice]
                    if 0 <= expert < up.shape[0] and share != 0:
                        both = (up[expert] @ x[row].float()).bfloat16().float()
                        g, u = both.chunk(2)
                        inner = (F.silu(g) * u).bfloat16().float()
                        out[row] += share * (down[expert] @ inner).to(each).float()
            return out.to(x.dtype)

        return experts

    return wrap


def test_experts_may_keep_inner_values_in_bf16(passes: Passes) -> None:
    for family in FAMILIES:
        id = f"ops.{family}[moe_experts/nvfp4+bf16]"
        result = passes(id, moe_experts=_narrow_experts(torch.float32))
        assert all(one.ratio < 0.8 for one in result.measures)


def test_experts_keep_inner_values_in_fp32_for_fp32(dies: Dies) -> None:
    dies("ops.elements[moe_experts/bf16+fp32]", moe_experts=_narrow_experts(torch.float32))


def _quantised(wide: Tensor, act: str) -> Tensor:
    """Rows fp32 as they come back from a format of activations."""
    if act == "mxfp4":
        return mxfp4.dequantize(*mxfp4.quantize(wide))
    if act == "fp8_block":
        return fp8_block.dequantize_activation(*fp8_block.quantize_activation(wide))
    if act == "fp8_tensor":
        return torch.stack([fp8_tensor.dequantize(*fp8_tensor.quantize(row)) for row in wide])
    if act == "nvfp4":
        scales = [nvfp4.global_multiplier(row) for row in wide]
        rows = [nvfp4.quantize(row, multiplier=m) for row, m in zip(wide, scales, strict=True)]
        each = zip(rows, scales, strict=True)
        return torch.stack([nvfp4.dequantize(*row, multiplier=m) for row, m in each])
    return wide


def _quantized_gemm(act: str, units: Op) -> Callable[[Op], Op]:
    """A gemm that quantises its input first, and sums by ``units`` of x and w."""

    def wrap(honest: Op) -> Op:
        def call(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
            wide = _quantised(x.float(), act)
            return units(wide, decode_weight(weight)).to(out_dtype or x.dtype)

        return call

    return wrap


def _quantized_experts(act: str, inner_act: str) -> Callable[[Op], Op]:
    """Experts that quantise the inputs of their first and their second product."""

    def wrap(honest: Op) -> Op:
        def experts(x: Tensor, w13: Weight, w2: Weight, w: Tensor, ids: Tensor, *rest: Any) -> Any:
            up, down = decode_weight(w13), decode_weight(w2)
            given, out = _quantised(x.float(), act), torch.zeros(x.shape)
            for row, choices in enumerate(ids.tolist()):
                for share, expert in zip(w[row], choices, strict=True):
                    g, u = (up[expert] @ given[row]).bfloat16().float().chunk(2)
                    inner = (F.silu(g) * u).bfloat16().float()
                    out[row] += share * (down[expert] @ _quantised(inner[None], inner_act)[0])
            return out.to(x.dtype)

        return experts

    return wrap


def _short_sums(x: Tensor, w: Tensor) -> Tensor:
    """Blocks of 128 are added in 4 steps, each cut off to 13 bits of fraction."""
    total = torch.zeros(x.shape[0], w.shape[0])
    for start in range(0, x.shape[1], 128):
        block = torch.zeros_like(total)
        for k in range(start, min(start + 128, x.shape[1]), 32):
            block = block + x[:, k : k + 32] @ w[:, k : k + 32].T
            block = (block.view(torch.int32) & ~0x3FF).view(torch.float32)
        total = total + block
    return total


ACTS = (
    "fp8_block+fp8_block",
    "fp8_tensor+fp8_tensor",
    "mxfp4+fp8_block",
    "mxfp4+mxfp4",
    "nvfp4+nvfp4",
)


@pytest.mark.parametrize("variant", ACTS)
def test_a_declared_quantised_activation_is_judged_as_one(
    passes: Passes, dies: Dies, variant: str
) -> None:
    act = variant.partition("+")[2]
    words = frozenset({f"act:{act}"})
    id = f"ops.elements[gemm/{variant}]"
    units = _short_sums if act.startswith("fp8") else _in_order
    passes(id, small=False, words=words, gemm=_quantized_gemm(act, units))
    dies(id, small=False, words=words, gemm=_quantized_gemm("none", units))


@pytest.mark.parametrize("variant", ["mxfp4+mxfp4", "nvfp4+nvfp4"])
def test_experts_with_a_quantised_activation_are_judged_as_such(
    passes: Passes, dies: Dies, variant: str
) -> None:
    act = variant.partition("+")[2]
    words = frozenset({f"act:{act}"})
    for family in FAMILIES:
        id = f"ops.{family}[moe_experts/{variant}]"
        passes(id, words=words, moe_experts=_quantized_experts(act, act))
    wrong = _quantized_experts("none", act)
    dies(f"ops.bias[moe_experts/{variant}]", small=False, words=words, moe_experts=wrong)


def test_one_expert_too_few_dies(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        def experts(x: Tensor, w13: Weight, w2: Weight, w: Tensor, ids: Tensor, *rest: Any) -> Any:
            return moe_experts(x, w13, w2, torch.where(ids == 5, 0.0, w), ids, *rest)

        return experts

    reason = dies("ops.structure[moe_experts/fp8_block+bf16]", small=False, moe_experts=wrap)
    assert "moe_experts" in reason


def test_angles_in_fp32_die_far_away(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        def rope(x: Tensor, positions: Tensor, freq: Tensor, pairs: bool, m: float) -> Tensor:
            angle = (positions.float().unsqueeze(-1) * freq).unsqueeze(1)
            a, b = (x.float()[..., i::2] for i in (0, 1))
            turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
            out = torch.stack(turned, -1).flatten(-2) * m
            return out.to(x.dtype) if pairs else honest(x, positions, freq, pairs, m)

        return rope

    assert "rope/bf16/pairs" in dies("ops.elements[rope/bf16]", rope=wrap)


def test_the_honest_backend_passes(verdict: Callable[..., CheckResult], checks: Any) -> None:
    for id in ("gemm/bf16+bf16", "rms_norm/fp32", "silu_mul/bf16", "rope/bf16", "router/bf16"):
        for family in FAMILIES:
            assert verdict(f"ops.{family}[{id}]").status is Status.PASS
