"""Weights and caches of the specialised decode: what the kernel can't read is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import LAYER_WEIGHTS, KVCache, LayerSpec, SSMaxSpec, Weight
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core_rocm.latency.inputs import addresses, cache_reasons, wanted, weight_reasons


@pytest.fixture
def small(make_layer: Callable[..., LayerSpec]) -> LayerSpec:
    """One rank's, of small widths: shapes are taken from the layer."""
    one = make_layer(1, hidden_size=64, heads=2, kv_lora_rank=32)
    assert one.moe is not None
    assert one.indexer is not None
    moe = replace(one.moe, experts=4, expert_width=32, shared_width=32)
    return replace(one, moe=moe, indexer=replace(one.indexer, heads=2, head_dim=16))


def right(layer: LayerSpec) -> dict[str, Tensor | Weight]:
    made: dict[str, Tensor | Weight] = {}
    for name, (shape, formats) in wanted(layer).items():
        if formats[0] in ("bfloat16", "float32"):
            made[name] = torch.zeros(shape, dtype=getattr(torch, formats[0]))
        else:
            made[name] = Weight(formats[0], shape, {"data": torch.zeros(4, 4)})
    return made


def told(layer: LayerSpec, weights: dict[str, Tensor | Weight]) -> dict[str, str]:
    return {
        one.subject.removeprefix("latency_specialized, layer 1, "): one.reason
        for one in weight_reasons(layer, weights)
    }


def test_what_fits_has_no_reason(small: LayerSpec) -> None:
    assert told(small, right(small)) == {}
    sharer = replace(small, kv_source=0, topk_source=0, indexer=None)
    assert {"wkv_a", "kv_a_norm", "index_wq", "index_wk"} & wanted(sharer).keys() == set()
    assert told(sharer, right(sharer)) == {}


def test_each_weight_at_fault_is_named(small: LayerSpec) -> None:
    weights = right(small)
    del weights["wo"]
    weights["gate"] = torch.zeros(4, 65)
    weights["experts_w2"] = Weight("fp8_block", (4, 64, 32), {"data": torch.zeros(4, 4)})
    weights["wq"] = Weight("bf16", wanted(small)["wq"][0], {"data": torch.zeros(4, 4).t()[:, :2]})
    weights["ffn_norm"] = torch.zeros(64, dtype=torch.float16)
    assert told(small, weights) == {
        "wo": "it is not there",
        "gate": "its shape is [4, 65], not [4, 64]",
        "experts_w2": "it is fp8_block, not mxfp4",
        "wq": "its data is not contiguous: strides (1, 4)",
        "ffn_norm": "it is float16, not bfloat16 or float32",
    }


def test_vectors_of_attention_and_index_are_asked_for(small: LayerSpec) -> None:
    """Every weight that the layer's own spec names: a kernel has no other place to look."""
    assert small.indexer is not None
    learned = SSMaxSpec(kind="log", per_head=True, bias=True)
    layer = replace(small, ssmax=learned, indexer=replace(small.indexer, ssmax=learned))
    weights = right(layer)
    for part in ("weight", "bias"):
        weights[f"index_q_norm_{part}"] = torch.zeros(16)  # one norm for all heads
    assert told(layer, weights) == {}
    named = {name for name in LAYER_WEIGHTS if name.startswith(("index_", "ssmax_", "inv_"))}
    assert named <= weights.keys()
    for name in named:
        missing = {key: value for key, value in weights.items() if key != name}
        assert told(layer, missing) == {name: "it is not there"}
    weights["index_q_norm_bias"] = torch.zeros(3, 16)
    assert told(layer, weights) == {"index_q_norm_bias": "its shape is [3, 16], not [2, 16]"}


def test_a_dense_layer_is_a_mistake(small: LayerSpec) -> None:
    with pytest.raises(ValueError, match="layer 1 is dense"):
        wanted(replace(small, moe=None))


def cache(layout: Any, blocks: int = 2, block_size: int = 64) -> KVCache:
    rows = torch.zeros(blocks, block_size, layout.width)
    scale = torch.ones(1) if layout.fp8 and layout.role == "latent" else None
    return KVCache(layout, block_size, layout.pack(rows, scale), scale)


@pytest.mark.parametrize(
    ("made", "reasons"),
    [
        (cache(latent_layout("e4m3")), []),
        (cache(latent_layout("bf16")), []),
        (cache(index_layout("tiled16_f32")), []),
        (cache(latent_layout("fp32")), ["its layout is fp32, not e4m3 or bf16"]),
        (cache(index_layout("planar_f32")), ["its layout is planar_f32, not tiled16_f32"]),
        (
            cache(latent_layout("bf16"), block_size=16),
            ["its pages are of 16 tokens, not of 64"],
        ),
    ],
)
def test_caches(made: KVCache, reasons: list[str]) -> None:
    assert [one.reason for one in cache_reasons("layer 1, latent", made)] == reasons


def test_strided_pages_and_a_lost_scale() -> None:
    whole = cache(latent_layout("e4m3"), blocks=4)
    strided = replace(whole, parts=tuple(part[::2] for part in whole.parts), scale=None)
    assert [one.reason for one in cache_reasons("latent", strided)] == [
        "its pages are not dense",
        "it has no scale of one fp32 number",
    ]
    assert addresses(whole) == addresses(replace(whole, scale=None))
    assert addresses(whole) != addresses(cache(latent_layout("e4m3")))
