"""AITER's experts, products, norms, gate and cache write against a fake that reads byte orders."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ml4core.api import KVCache, Weight
from ml4core.api.known_layouts import latent_layout
from ml4core.formats import fp8_block, mxfp4
from ml4core_rocm.switches import MOE_BOUND

from .fake_aiter import Fake

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def far(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


def experts(random: torch.Generator, count: int, hidden: int, width: int) -> tuple[Weight, Weight]:
    made = []
    for shape in ((count, 2 * width, hidden), (count, hidden, width)):
        data, scale = mxfp4.quantize(torch.randn(shape, generator=random) * 0.1)
        made.append(Weight("mxfp4", shape, {"data": data, "scale": scale}))
    return made[0], made[1]


def mixed(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for weight, expert in zip(weights[t], ids[t].tolist(), strict=True):
            if 0 <= expert < len(w13):
                gate, up = (w13[expert].double() @ x[t].double()).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                out[t] += float(weight) * (w2[expert].double() @ inner)
    return out


def values(weight: Weight) -> torch.Tensor:
    return mxfp4.dequantize(weight.data, weight.parts["scale"])


@pytest.mark.parametrize("mode", ["a4w4", "a8w4"])
def test_experts_in_mxfp4(aiter: Fake, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    from ml4core_rocm.kernels import aiter_experts

    if mode == "a8w4":
        monkeypatch.setenv(MOE_BOUND, "0")
    random = draw(12)
    w13, w2 = experts(random, 3, 256, 256)
    x = torch.randn(3, 256, generator=random).bfloat16()
    ids = torch.tensor([[0, 2], [1, 0], [2, 1]])
    weights = torch.rand(3, 2, generator=random)
    found = aiter_experts.fused(x, aiter_experts.arrange(w13, w2, mode), weights, ids)
    want = mixed(x, values(w13), values(w2), weights, ids)
    error = far(found, want)
    assert error < (0.25 if mode == "a4w4" else 0.06)
    assert error > (0.06 if mode == "a4w4" else 0.005)  # activations of the other mode
    given = aiter.last("fused_moe")
    assert given["gate_mode"] == ("separated" if mode == "a4w4" else "interleave")


def test_gates_in_the_other_order_are_wrong(aiter: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake tells them apart: weights of one mode in a call of the other."""
    from ml4core_rocm.kernels import aiter_experts

    monkeypatch.setenv(MOE_BOUND, "0")
    random = draw(13)
    w13, w2 = experts(random, 2, 256, 256)
    x = torch.randn(2, 256, generator=random).bfloat16()
    ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
    crossed = dataclasses.replace(aiter_experts.arrange(w13, w2, "a8w4"), mode="a4w4")
    found = aiter_experts.fused(x, crossed, weights, ids)
    assert far(found, mixed(x, values(w13), values(w2), weights, ids)) > 0.5


def test_eight_bit_activations_need_their_bound(
    aiter: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ml4core_rocm.kernels import aiter_experts

    monkeypatch.delenv(MOE_BOUND, raising=False)
    random = draw(14)
    arranged = aiter_experts.arrange(*experts(random, 1, 256, 256), "a8w4")
    x = torch.zeros(1, 256).bfloat16()
    with pytest.raises(RuntimeError, match="AITER_BF16_FP8_MOE_BOUND=0"):
        aiter_experts.fused(x, arranged, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.long))
    assert aiter.calls == []


def test_experts_of_other_ranks(aiter: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    from ml4core_rocm.kernels import aiter_experts

    monkeypatch.setenv(MOE_BOUND, "0")
    random = draw(15)
    w13, w2 = experts(random, 2, 256, 256)
    x = torch.randn(2, 256, generator=random).bfloat16()
    ids = torch.tensor([[0, 4], [5, 9]])
    weights = torch.rand(2, 2, generator=random)
    arranged = aiter_experts.arrange(w13, w2, "a8w4")
    found = aiter_experts.fused(x, arranged, weights, ids, 4, 10)
    want = mixed(x, values(w13), values(w2), weights, ids - 4)
    assert far(found, want) < 0.06
    given = aiter.last("fused_moe")  # a choice more, of an expert that no rank has
    assert given["topk_ids"].tolist() == [[0, 4, 10], [5, 9, 10]]
    assert given["topk_weight"][:, 2].tolist() == [0.0, 0.0]
    assert given["expert_mask"].tolist() == [0] * 4 + [1] * 2 + [0] * 5
    separated = aiter_experts.arrange(w13, w2, "a4w4")
    with pytest.raises(ValueError, match="a8w4"):
        aiter_experts.fused(x, separated, weights, ids, 4, 10)


def test_experts_that_the_tiles_do_not_divide(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_experts import arrange

    random = draw(17)
    with pytest.raises(ValueError, match="multiples of 256; these are 256 and 384"):
        arrange(*experts(random, 1, 256, 384), "a4w4")
    with pytest.raises(ValueError, match="multiples of 128; these are 256 and 192"):
        arrange(*block_experts(random, 1, 256, 192), "fp8_block")
    with pytest.raises(ValueError, match="takes experts in fp8_block, not mxfp4"):
        arrange(*experts(random, 1, 256, 256), "fp8_block")
    other = [Weight("fp8_block", one.shape, one.parts) for one in experts(random, 1, 256, 256)]
    with pytest.raises(ValueError, match="takes experts in mxfp4, not fp8_block"):
        arrange(*other, "a8w4")
    with pytest.raises(ValueError, match="'a16w4'"):
        arrange(*experts(random, 1, 256, 256), "a16w4")  # type: ignore[arg-type]


def block_experts(
    random: torch.Generator, count: int, hidden: int, width: int
) -> tuple[Weight, Weight]:
    made = []
    for shape in ((count, 2 * width, hidden), (count, hidden, width)):
        data, scale = fp8_block.quantize_weight(torch.randn(shape, generator=random) * 0.1)
        made.append(Weight("fp8_block", shape, {"data": data, "scale": scale}))
    return made[0], made[1]


def test_experts_in_fp8_by_blocks(aiter: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and as one of several ranks; with inputs in FP8 by blocks, whatever the bound of other
    experts is.
    """
    from ml4core_rocm.kernels import aiter_experts

    monkeypatch.delenv(MOE_BOUND, raising=False)
    random = draw(16)
    w13, w2 = block_experts(random, 2, 256, 384)
    x = torch.randn(3, 256, generator=random).bfloat16()
    weights = torch.rand(3, 2, generator=random)
    arranged = aiter_experts.arrange(w13, w2, "fp8_block")
    plain = [fp8_block.dequantize_weight(one.data, one.parts["scale"]) for one in (w13, w2)]
    for ids, first, total in (
        (torch.tensor([[0, 1], [1, 0], [0, 1]]), 0, 2),
        (torch.tensor([[4, 5], [5, 9], [0, 4]]), 4, 10),
    ):
        found = aiter_experts.fused(x, arranged, weights, ids, first, total)
        error = far(found, mixed(x, *plain, weights, ids - first))
        assert 0.005 < error < 0.06  # inputs of both products are FP8
    given = aiter.last("fused_moe")
    assert (given["gate_mode"], given["quant_type"].name) == ("separated", "per_128x128")
    assert given["expert_mask"].tolist() == [0] * 4 + [1] * 2 + [0] * 5
    other = dataclasses.replace(arranged, w13=w13.data.view(torch.float8_e4m3fn))  # not in tiles
    ids = torch.tensor([[0, 1]] * 3)
    assert far(aiter_experts.fused(x, other, weights, ids), mixed(x, *plain, weights, ids)) > 0.5


def test_plain_products(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_gemm import plain_gemm

    random = draw(20)
    x = torch.randn(5, 320, generator=random).bfloat16()
    data = torch.randn(200, 320, generator=random).bfloat16()
    weight = Weight("bf16", (200, 320), {"data": data})
    assert far(plain_gemm(x, weight), x.double() @ data.double().T) < 4e-3
    assert plain_gemm(x[:0], weight).shape == (0, 200)
    assert aiter.names() == ["gemm_a16w16"]
    with pytest.raises(ValueError, match="takes bf16, not fp32"):
        plain_gemm(x, Weight("fp32", (200, 320), {"data": data.float()}))
    with pytest.raises(ValueError, match="float32"):
        plain_gemm(x.float(), weight)


def test_gates(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_small import silu_mul

    x = torch.randn(3, 512, generator=draw(21)).bfloat16()
    gate, up = x.double().chunk(2, -1)
    assert far(silu_mul(x), torch.nn.functional.silu(gate) * up) < 4e-3
    assert silu_mul(x[:0]).shape == (0, 256)
    assert aiter.names() == ["silu_and_mul"]


def test_latents_are_copied_to_their_slots(aiter: Fake) -> None:
    """As our own kernel writes them, in pages that lie apart and of rows that do."""
    from ml4core_rocm.kernels.aiter_small import kv_write, takes_latents
    from ml4core_triton.kernels.kv_write import kv_write as ours

    random, layout = draw(22), latent_layout("bf16")
    made = torch.randn(5, 576, generator=random).bfloat16()
    latent, rope = made.split([512, 64], -1)
    slots = torch.tensor([3, -1, 16, 31, 0])
    written = []
    for write in (kv_write, ours):
        pages = torch.full((4, 16, 576), 7.0).bfloat16()
        cache = KVCache(layout, 16, (pages[::2],))
        assert takes_latents(cache, latent, rope)
        write(cache, slots, latent, rope, *([torch.ones(1)] if write is kv_write else []))
        written.append(pages)
    assert torch.equal(*written)
    given = aiter.last("concat_and_cache_mla")
    assert given["kv_c"].data_ptr() == made.data_ptr()  # not copied
    odd = torch.randn(5, 581, generator=random).bfloat16()[:, 5:]
    kv_write(cache, slots, odd[:, :512], odd[:, 512:], torch.ones(1))
    kv_write(cache, slots[:0], latent[:0], rope[:0], torch.ones(1))
    assert aiter.names().count("concat_and_cache_mla") == 2
    assert not takes_latents(cache, latent, None)
    assert not takes_latents(cache, latent.float(), rope)
    fp8 = latent_layout("e4m3")
    codes = torch.zeros(2, 16, 576, dtype=torch.uint8)
    assert not takes_latents(KVCache(fp8, 16, (codes,), torch.ones(1)), latent, rope)


def test_block_fp8_products(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_gemm import block_gemm

    random = draw(18)
    data, scale = fp8_block.quantize_weight(torch.randn(200, 320, generator=random))
    weight = Weight("fp8_block", (200, 320), {"data": data, "scale": scale})
    x = torch.randn(5, 320, generator=random).bfloat16()
    want = x.double() @ fp8_block.dequantize_weight(data, scale).double().T
    assert 1e-3 < far(block_gemm(x, weight), want) < 0.05
    with pytest.raises(ValueError, match="float32"):
        block_gemm(x, weight, torch.float32)


def test_norms(aiter: Fake) -> None:
    from ml4core_rocm.kernels.aiter_norms import add_rms_norm, rms_norm

    random = draw(19)
    x, residual = (torch.randn(3, 256, generator=random).bfloat16() for _ in range(2))
    weight = torch.rand(256, generator=random)
    wide = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert far(rms_norm(x.view(3, 2, 128).flatten(1), weight, 1e-6), wide * weight) < 8e-3
    summed, normed = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(summed, (x.float() + residual.float()).bfloat16())
    both = summed.double()
    want = both / (both.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert far(normed, want) < 8e-3
