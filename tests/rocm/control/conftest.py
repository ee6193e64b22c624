"""Deployments of the published model on AMD GPUs, as they would be resolved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ml4core.api import Deployment, IndexerSpec, LayerSpec, ModelSpec, MoESpec, RopeSpec, SSMaxSpec
from ml4core_rocm.devices import REFERENCE


def layer(index: int, **more: Any) -> LayerSpec:
    """A layer of the published widths, with rope, its own latent and its own index."""
    fields: dict[str, Any] = {
        "index": index,
        "hidden_size": 6144,
        "heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "nope_dim": 64,
        "rope_dim": 64,
        "v_dim": 128,
        "norm_eps": 1e-6,
        "softmax_scale": 0.1,
        "rope": RopeSpec(64, 1e4),
        "ssmax": SSMaxSpec(),
        "kv_source": index,
        "topk_source": index,
        "indexer": IndexerSpec(32, 128, 2048, 64),
        "dense_width": None,
        "moe": MoESpec(128, 4, 6144, 6144),
    }
    return LayerSpec(**(fields | more))


MODEL = ModelSpec("ml4", 131072, 6144, 1e-6, 1 << 20, False, (layer(0), layer(1)))


def deployment(**more: Any) -> Deployment:
    fields: dict[str, Any] = {
        "model": MODEL,
        "device": REFERENCE,
        "dtype": "bfloat16",
        "kv_layout": "e4m3",
        "index_layout": "tiled16_f32",
        "weight_formats": frozenset({"fp8_block", "bf16"}),
    }
    return Deployment(**(fields | more))


@pytest.fixture
def deploy() -> Callable[..., Deployment]:
    return deployment


@pytest.fixture
def make_layer() -> Callable[..., LayerSpec]:
    return layer
