"""Vendor libraries as providers: absent, unfit, and called, with stand-ins that record."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache, Weight
from ml4core.api.known_layouts import latent_layout
from ml4core_cuda import ops
from ml4core_cuda.providers import PEERS, Peer, lacking
from ml4core_cuda.tuned import Table

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

Library = Callable[..., ModuleType]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Puts a module of a name into place, with these attributes."""

    def put(name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        module.__spec__ = sys.__spec__
        for key, value in attributes.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


def peer(name: str) -> Peer:
    return next(one for one in PEERS if one.name == name)


def decode(
    q: Tensor, k_cache: Tensor, block_table: Any, cache_seqlens: Any, head_dim_v: int,
    tile_scheduler_metadata: Any, num_splits: Any, softmax_scale: float, is_fp8_kvcache: bool,
    indices: Tensor, use_legacy: bool = False,
) -> Any:  # fmt: skip
    raise NotImplementedError


def test_an_absent_library_says_so() -> None:
    for one in PEERS:
        if one.module not in sys.modules:
            assert one.absent() == f"the library {one.module} is not installed"


def test_a_release_is_judged_by_its_signatures(library: Library) -> None:
    library("flash_mla", get_mla_metadata=lambda: None)
    assert "has no flash_mla_with_kvcache" in peer("FlashMLA").absent()
    library("flash_mla", get_mla_metadata=lambda: None, flash_mla_with_kvcache=lambda q: q)
    assert "takes no k_cache, head_dim_v" in peer("FlashMLA").absent()
    named = {"get_mla_metadata": lambda: None, "flash_mla_with_kvcache": decode}
    library("flash_mla", **named, has_legacy=lambda: False)
    assert "without the kernels of sm_90" in peer("FlashMLA").absent()
    library("flash_mla", **named, has_legacy=lambda: True)
    assert peer("FlashMLA").absent() == ""
    library("flashinfer", top_k=lambda scores: scores)
    assert "its top_k takes no k" in peer("FlashInfer").absent()
    library("deep_gemm")
    assert "it has no fp8_gemm_nt" in peer("DeepGEMM").absent()


def test_a_function_that_does_not_tell_its_arguments_is_taken() -> None:
    module = ModuleType("any")
    module.f = lambda **named: named  # type: ignore[attr-defined]
    module.g = max  # type: ignore[attr-defined]
    assert lacking(module, f=("k",), g=("k",)) == ""


@pytest.mark.parametrize("split", [False, True], ids=["one set of kernels", "kernels apart"])
def test_flash_mla_is_called_as_its_release_wants(library: Library, split: bool) -> None:
    from ml4core_cuda.kernels.flash_mla import sparse_mla

    calls: list[dict[str, Any]] = []

    def old(
        q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int, meta: Any,
        splits: Any, *, softmax_scale: float, is_fp8_kvcache: bool, indices: Tensor,
    ) -> Any:  # fmt: skip
        calls.append(dict(q=q, rows=k_cache, indices=indices, scale=softmax_scale, meta=meta))
        rows, _, heads, _ = q.shape
        return torch.ones(rows, 1, heads, 512), torch.zeros(rows, heads, 1)

    def new(*args: Any, use_legacy: bool = False, **named: Any) -> Any:
        assert use_legacy
        return old(*args, **named)

    library(
        "flash_mla",
        get_mla_metadata=lambda *args, **named: ("plan", None),
        flash_mla_with_kvcache=new if split else old,
    )
    layout = latent_layout("fp8_ds_mla")
    cache = KVCache(layout, 64, (torch.zeros(layout.parts[0].shape(2, 64), dtype=torch.uint8),))
    slots = torch.tensor([[3, 127, 128, 7], [9, 9, 9, 9]], dtype=torch.int32)
    lens = torch.tensor([3, 0], dtype=torch.int32)
    out, lse = sparse_mla(torch.zeros(2, 8, 576).bfloat16(), cache, slots, lens, 0.5)
    (call,) = calls
    assert call["q"].shape == (2, 1, 64, 576)
    assert call["indices"][:, 0].tolist() == [[3, 127, -1, -1], [-1, -1, -1, -1]]
    assert (call["scale"], call["meta"]) == (0.5, "plan")
    assert call["rows"].shape == (2, 64, 1, 656)
    assert out.shape == (2, 8, 512)
    assert bool((out[0] == 1).all())
    assert not bool(out[1].any())
    assert bool(torch.isneginf(lse[1]).all())
    with pytest.raises(ValueError, match="up to 128 heads"):
        sparse_mla(torch.zeros(2, 129, 576).bfloat16(), cache, slots, lens, 0.5)


def test_flashinfers_choice_comes_in_our_order(library: Library) -> None:
    from ml4core_cuda.kernels.flashinfer import top_k

    library("flashinfer", top_k=lambda scores, k: scores.topk(k))
    scores = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    scores[1, 4] = torch.nan
    positions, lens, has_nan = top_k(scores, torch.tensor([40, 12, 3]), 5)
    assert lens.tolist() == [5, 5, 3]
    assert has_nan.tolist() == [False, True, False]
    assert positions[2].tolist() == [0, 1, 2, -1, -1]
    seen = scores[1, :12].nan_to_num(-9.0)
    assert positions[1].tolist() == sorted(seen.topk(5)[1].tolist())


class Codes:
    """What quantising gives."""

    def __init__(self, x: Tensor) -> None:
        self.data, self.scale = x.to(torch.uint8), torch.ones(len(x), x.shape[1] // 128)


def test_deep_gemm_serves_large_products_where_it_was_faster(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ml4core_cuda.kernels import deep_gemm

    calls = []

    def fp8_gemm_nt(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor) -> None:
        calls.append([tuple(one.shape) for one in (*a, *b)])
        out.fill_(3.0)

    library("deep_gemm", fp8_gemm_nt=fp8_gemm_nt)
    tables = {"X": Table("today", {}, {"gemm": ((1, "triton", ""), (64, "DeepGEMM", "faster"))})}
    monkeypatch.setattr(ops, "measured", lambda: tables)
    assert ops.library_rows("X") == 64
    assert ops.library_rows("Y") is None
    library("deep_gemm")
    assert ops.library_rows("X") is None
    library("deep_gemm", fp8_gemm_nt=fp8_gemm_nt)
    codes = torch.zeros(128, 256, dtype=torch.uint8)
    weight = Weight("fp8_block", (128, 256), {"data": codes, "scale": torch.ones(1, 2)})
    monkeypatch.setattr(deep_gemm, "quantized", lambda x, act: Codes(x))
    gemm = deep_gemm.serving(lambda x, w, dtype=None: "ours", 64)  # type: ignore[arg-type,return-value]
    found = gemm(torch.ones(64, 256).bfloat16(), weight)
    assert found.shape == (64, 128)
    assert bool((found == 3).all())
    assert calls == [[(64, 256), (64, 2), (128, 256), (1, 2)]]
    assert gemm(torch.ones(63, 256).bfloat16(), weight) == "ours"
    assert gemm(torch.ones(64, 256), weight) == "ours"
    with pytest.raises(ValueError, match="fp8_block matrices"):
        deep_gemm.product(torch.ones(4, 8), Weight("bf16", (8, 8), {"data": torch.ones(8, 8)}))
