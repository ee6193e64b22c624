"""Ops in AITER's hands: which it serves, which fall back to ours, and what is told of the others.
AITER is a stand-in with the signatures of a release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ml4core.api import OPS, Deployment, KVCache, Weight
from ml4core.api.known_layouts import latent_layout
from ml4core.formats import mxfp4
from ml4core_rocm.aiter_ops import FORMAT, arranged, with_aiter
from ml4core_rocm.alone import ALONE, IN_STAGES
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.devices import REFERENCE
from ml4core_rocm.providers import PEERS, expert_mode
from ml4core_rocm.switches import VARIABLES, read

from .control.conftest import deployment
from .fake_aiter import Fake

Deploy = Callable[..., Deployment]
AITER, SPARSE, _ = VARIABLES.values()
A4W4 = {"fp8_moe_requant": "mxfp4", "fp8_moe_requant_act": "a4w4"}


@pytest.fixture
def deploy() -> Deploy:
    return deployment


def experts(count: int, rows: int, columns: int, seed: int) -> Weight:
    draw = torch.Generator().manual_seed(seed)
    data, scale = mxfp4.quantize(torch.randn(count, rows, columns, generator=draw) * 0.1)
    return Weight("mxfp4", (count, rows, columns), {"data": data, "scale": scale})


def small(whole: Deployment) -> Deployment:
    """Experts of 256 x 256, which AITER's tiles divide."""
    layers = []
    for one in whole.model.layers:
        assert one.moe is not None
        moe = replace(one.moe, experts=4, topk=2, expert_width=256)
        layers.append(replace(one, hidden_size=256, moe=moe))
    return replace(whole, model=replace(whole.model, layers=tuple(layers)))


def test_ops_in_its_hands_fall_back_to_ours(deploy: Deploy, aiter: Fake) -> None:
    asks = small(deploy(additional_config=A4W4, needs=frozenset({"act:fp8_block"})))
    switches, _ = read(asks, capabilities(REFERENCE), {AITER: "1"})
    asked: list[str] = []

    def ours(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            asked.append(name)
            return None

        return call

    names = ("rms_norm", "all_reduce_rms_norm", "gemm", "moe_experts", "silu_mul", "kv_write")
    names = (*names, "router", "topk")  # of which one is ours alone and one is a stage's
    ops, words = with_aiter({name: ours(name) for name in names}, asks, switches)
    assert words == {
        "op rms_norm": "AITER RMS norm 0.1.21",
        "op all_reduce_rms_norm": "AITER sum and RMS norm 0.1.21",
        "op gemm": "AITER block FP8 product 0.1.21 | AITER bf16 product 0.1.21",
        "op silu_mul": "AITER gate 0.1.21",
        "op moe_experts": "AITER fused experts 0.1.21",
        "op kv_write": "triton; not AITER latent write: its cast to FP8 doesn't saturate, which "
        "rows of a cache do, so it copies bf16 alone; the cache is e4m3",
        "op router": f"triton; not AITER: {ALONE['router']}",
    }
    x, weight = torch.randn(2, 256).bfloat16(), torch.ones(256)
    normed = ops["rms_norm"](x, weight, 1e-6)
    torch.testing.assert_close(
        normed, torch.nn.functional.rms_norm(x, (256,), eps=1e-6), atol=0.02, rtol=0.02
    )
    ops["rms_norm"](x.float(), weight, 1e-6)
    twice = SimpleNamespace(all_reduce=lambda x: 2 * x)
    given = (x, x, weight, 1e-6, twice)
    summed, both = ops["all_reduce_rms_norm"](*given)
    assert torch.equal(summed, (3 * x.float()).bfloat16())
    want = torch.nn.functional.rms_norm(summed, (256,), eps=1e-6)
    torch.testing.assert_close(both, want, atol=0.02, rtol=0.02)
    ops["all_reduce_rms_norm"](x.float(), *given[1:])
    ops["all_reduce_rms_norm"](x, x, None, 1e-6, twice)
    ones = {"data": torch.ones(8, 256).bfloat16()}
    assert torch.equal(
        ops["gemm"](x, Weight("bf16", (8, 256), ones)),
        x.double().sum(1, keepdim=True).bfloat16().expand(2, 8),
    )
    ops["gemm"](x, Weight("bf16", (8, 256), ones), torch.float32)
    ops["gemm"](x, Weight("mxfp4", (8, 256), ones), None)
    gated = torch.nn.functional.silu(x[:, :128].double()) * x[:, 128:].double()
    torch.testing.assert_close(ops["silu_mul"](x).double(), gated, atol=0.02, rtol=0.02)
    ops["silu_mul"](x.float())
    ops["kv_write"](latents := cache("e4m3"), slots := torch.tensor([1, 2]), x, x[:, :64])
    w13, w2 = experts(4, 512, 256, 1), experts(4, 256, 256, 2)
    choices = (torch.full((2, 2), 0.5), torch.tensor([[0, 1], [2, 3]]))
    ops["moe_experts"](x, w13, w2, *choices)  # not in its order
    sums = ["all_reduce_rms_norm"] * 2
    products = ["gemm", "gemm", "silu_mul", "kv_write"]
    assert asked == ["rms_norm", *sums, *products, "moe_experts"]
    ready = arranged({"experts_w13": w13, "experts_w2": w2, "gate": weight}, "a4w4")
    stacks = [ready[f"experts_{name}"] for name in ("w13", "w2")]
    assert [one.format for one in stacks] == [f"{FORMAT}a4w4"] * 2  # type: ignore[union-attr]
    assert ready["gate"] is weight
    out = ops["moe_experts"](x, *stacks, *choices)
    assert out.shape == x.shape
    assert bool(out.isfinite().all())
    assert aiter.names()[-1] == "fused_moe"
    assert len(asked) == 8
    assert (latents.parts[0][0, 1:3] == 0).all()
    whole = replace(asks, kv_layout="bf16")
    ops, words = with_aiter({"kv_write": ours("kv_write")}, whole, switches)
    assert words["op kv_write"] == "AITER latent write 0.1.21"
    rows = torch.randn(2, 576).bfloat16()
    ops["kv_write"](plain := cache("bf16"), slots, rows[:, :512], rows[:, 512:])
    assert torch.equal(plain.parts[0][0, 1:3], rows)
    ops["kv_write"](plain, slots, rows[:, :512], None)
    assert asked[8:] == ["kv_write"]


def cache(layout: str) -> KVCache:
    found = latent_layout(layout)
    dtype = getattr(torch, found.parts[0].dtype)
    return KVCache(found, 16, (torch.zeros(found.parts[0].shape(2, 16), dtype=dtype),))


def test_every_op_has_a_second_provider_or_a_reason() -> None:
    served = {peer.part for peer in PEERS if peer.part in OPS}
    assert served | set(ALONE) | set(IN_STAGES) == set(OPS)
    assert not served & set(ALONE)
    assert set(IN_STAGES.values()) <= {peer.part for peer in PEERS}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"needs": frozenset()}, "doesn't ask for"),
        ({"weight_formats": frozenset({"nvfp4", "bf16"})}, "and weights are bf16, nvfp4"),
        ({"device": replace(REFERENCE, arch="gfx942")}, "experts in e4m3fn on; this is gfx942"),
        ({"tensor_parallel_size": 4}, "tiles are 128 wide, and experts of a rank are [64]"),
        ({"tensor_parallel_size": 4, "enable_expert_parallel": True}, ""),
    ],
)
def test_experts_in_fp8_by_blocks(
    deploy: Deploy, aiter: Fake, changes: dict[str, Any], reason: str
) -> None:
    asks = small(deploy(**{"needs": frozenset({"act:fp8_block"})} | changes))
    switches, _ = read(asks, capabilities(asks.device), {AITER: "1"})
    assert expert_mode(asks, switches) == ("fp8_block" if asks.needs else "")
    _, words = with_aiter({"moe_experts": lambda *args: None}, asks, switches)
    if reason:
        assert reason in words["op moe_experts"]
    else:
        assert words["op moe_experts"] == "AITER fused experts 0.1.21"


def test_ops_that_it_cannot_serve_say_why(deploy: Deploy, aiter: Fake) -> None:
    asks = deploy(dtype="float32", additional_config=A4W4, enable_expert_parallel=True)
    switches, _ = read(asks, capabilities(REFERENCE), {AITER: "1"})
    ops, words = with_aiter({"rms_norm": lambda *args: None}, asks, switches)
    assert set(ops) == {"rms_norm"}
    assert words["op rms_norm"].startswith("triton; not AITER RMS norm: its rows are bfloat16")
    assert "doesn't ask for" in words["op gemm"]
    assert "no mask of other ranks' experts" in words["op moe_experts"]
    narrow = small(deploy(additional_config=A4W4, tensor_parallel_size=2))
    _, words = with_aiter({}, narrow, replace(switches))
    assert "experts of a rank are [128]" in words["op moe_experts"]


def test_experts_in_other_formats_keep_their_order() -> None:
    plain = {"experts_w13": torch.zeros(1), "wq": torch.zeros(1)}
    assert arranged(plain, "a4w4") is plain
    fp8 = Weight("fp8_block", (1, 256, 128), {"data": torch.zeros(1), "scale": torch.zeros(1)})
    both = {"experts_w13": fp8, "experts_w2": fp8}
    assert arranged(both, "a8w4") is both
