"""The layer table of the published model, as data of ``ml4core.api``: what its caches cost."""

from __future__ import annotations

from ml4core.api import IndexerSpec, LayerSpec, ModelSpec, MoESpec, RopeSpec, SSMaxSpec

LAYERS, HIDDEN, HEADS = 72, 6144, 64
_SHARED_FROM = 35
"""The layer whose latent cache the later layers without rope read."""
_OWNERS_UNTIL = 16
"""Every layer before has an indexer of its own; behind, two of four have."""


def published_model() -> ModelSpec:
    """72 layers: every fourth without rope, 63 with a latent cache, 44 with an indexer."""
    layers = []
    source = 0
    for index in range(LAYERS):
        nope = index % 4 == 3
        if index < _OWNERS_UNTIL or index % 4 in (0, 3):
            source = index
        layers.append(_layer(index, nope, source))
    return ModelSpec("published shape", 131072, HIDDEN, 1e-6, 2**18, False, tuple(layers))


def _layer(index: int, nope: bool, topk_source: int) -> LayerSpec:
    rope_dim = 0 if nope else 64
    owns_index = topk_source == index
    return LayerSpec(
        index=index,
        hidden_size=HIDDEN,
        heads=HEADS,
        kv_lora_rank=512,
        q_lora_rank=None,
        nope_dim=64,
        rope_dim=rope_dim,
        v_dim=128,
        norm_eps=1e-6,
        softmax_scale=float((64 + rope_dim) ** -0.5),
        rope=None if nope else RopeSpec(64, 1e4),
        ssmax=SSMaxSpec(),
        kv_source=_SHARED_FROM if nope and index > _SHARED_FROM else index,
        topk_source=topk_source,
        indexer=IndexerSpec(32, 128, 2048, rope_dim) if owns_index else None,
        dense_width=16384 if index == 0 else None,
        moe=None if index == 0 else MoESpec(128, 4, HIDDEN, HIDDEN),
    )
