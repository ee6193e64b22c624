"""A small ML4 of the true layer pattern, in memory: its table of layers, and seeded weights.

Eight layers: 0 is dense; 3 and 7 have no rotary embedding, and 7 reads the latents of 3; 2, 5 and 6
use the selection of the nearest owner before them. Cache rows have the published widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    DraftSpec,
    DraftWeights,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    SSMaxSpec,
    VisionSpec,
    VisionWeights,
    Weight,
)
from ml4core.models.layer_table import build_model_spec
from ml4core.models.rope_freqs import inv_freq
from ml4core.models.seeded_config import SeededConfig
from ml4core_conformance.draw import Draw

Weights = dict[str, Tensor | Weight]
Quantise = Callable[[str, Tensor], Weight]
"""A matrix, by its name in ``LAYER_WEIGHTS``, in the format of a checkpoint."""

CONFIG = SeededConfig(
    layers=8,
    hidden=128,
    heads=8,
    v_dim=32,
    topk=16,
    dense_width=256,
    experts=8,
    experts_per_token=2,
    expert_width=128,
    vocab=512,
    yarn_original=32,
    index_interleave=False,
)
"""``yarn_original`` is small, so that prompts of the checks reach where positions are stretched.
Indexers pair other dims than attention does, as one flag for both would go unnoticed otherwise.
"""

KV_OWNERS = (0, 1, 2, 3, 4, 5, 6)
INDEX_OWNERS = (0, 1, 3, 4, 7)
SOURCES = {0: 0, 1: 1, 2: 1, 3: 3, 4: 4, 5: 4, 6: 4, 7: 7}
"""Written out, so that the table of layers is not its own judge."""


def model(**changes: Any) -> ModelSpec:
    """The tiny model; ``changes`` are fields of ``SeededConfig``."""
    return build_model_spec(replace(CONFIG, **changes).params(), name="tiny")


def without_index(layer: LayerSpec) -> LayerSpec:
    """The same layer, which attends to every visible key."""
    return replace(layer, topk_source=None, indexer=None)


@dataclass(frozen=True)
class TinyWeights:
    """Dense weights of a model, on the CPU."""

    top: Weights
    layers: tuple[Weights, ...]


def weights(spec: ModelSpec, seed: int, dtype: torch.dtype = torch.float32) -> TinyWeights:
    """Weights that keep activations near 1 and give logits a spread of about 2."""
    draw = Draw(seed, f"{spec.name}/weights")
    top: Weights = {
        "embedding": draw.normal(spec.vocab_size, spec.hidden_size, dtype=dtype),
        "final_norm": _norm(draw, spec.hidden_size, dtype),
        "output": _matrix(draw, spec.vocab_size, spec.hidden_size, dtype=dtype, gain=2.0),
    }
    return TinyWeights(top, tuple(layer_weights(one, draw, dtype) for one in spec.layers))


def layer_weights(layer: LayerSpec, draw: Draw, dtype: torch.dtype = torch.float32) -> Weights:
    """One layer's weights by the names of ``LAYER_WEIGHTS``."""
    hidden, latent, heads = layer.hidden_size, layer.kv_lora_rank, layer.heads

    def matrix(*shape: int, gain: float = 1.0) -> Weight:
        return _matrix(draw, *shape, dtype=dtype, gain=gain)

    found: Weights = {
        "attention_norm": _norm(draw, hidden, dtype),
        "ffn_norm": _norm(draw, hidden, dtype),
        "w_uk": _matrix(draw, heads, latent, layer.nope_dim, dtype=dtype),
        "w_uv": matrix(heads, layer.v_dim, latent),
        "wo": matrix(hidden, heads * layer.v_dim),
    }
    if layer.q_lora_rank is None:
        found["wq"] = matrix(heads * layer.q_dim, hidden)
    else:
        found["wq_a"] = matrix(layer.q_lora_rank, hidden)
        found["q_a_norm"] = _norm(draw, layer.q_lora_rank, dtype)
        found["wq_b"] = matrix(heads * layer.q_dim, layer.q_lora_rank)
    if layer.owns_kv:
        found["wkv_a"] = matrix(latent + layer.rope_dim, hidden)
        found["kv_a_norm"] = _norm(draw, latent, dtype)
    if layer.rope is not None:
        found["inv_freq"] = _frequencies(layer.rope, draw)
    if layer.ssmax.per_head:
        found["ssmax_scale"] = draw.uniform(heads, low=0.2, high=0.5)
    if layer.ssmax.bias:
        found["ssmax_bias"] = draw.uniform(heads, low=0.3, high=0.6)
    return found | _indexer(layer, draw, dtype) | _feed_forward(layer, draw, dtype)


def _indexer(layer: LayerSpec, draw: Draw, dtype: torch.dtype) -> Weights:
    spec = layer.indexer
    if spec is None:
        return {}
    source = layer.hidden_size
    if spec.query_input == "q_lora" and layer.q_lora_rank is not None:
        source = layer.q_lora_rank
    found: Weights = {
        "index_wq": _matrix(draw, spec.heads * spec.head_dim, source, dtype=dtype),
        "index_wk": _matrix(draw, spec.head_dim, layer.hidden_size, dtype=dtype),
        "index_weights_proj": _matrix(draw, spec.heads, layer.hidden_size),
    }
    for part in ("q", "k")[not spec.query_norm :]:
        found[f"index_{part}_norm_weight"] = draw.uniform(spec.head_dim, low=0.7, high=1.3)
        found[f"index_{part}_norm_bias"] = 0.1 * draw.normal(spec.head_dim)
    if spec.ssmax.per_head:
        found["index_ssmax_scale"] = draw.uniform(spec.heads, low=0.2, high=0.5)
    if spec.ssmax.bias:
        found["index_ssmax_bias"] = draw.uniform(spec.heads, low=0.3, high=0.6)
    return found


def _feed_forward(layer: LayerSpec, draw: Draw, dtype: torch.dtype) -> Weights:
    hidden, moe = layer.hidden_size, layer.moe

    def block(name: str, width: int) -> Weights:
        return {
            f"{name}_w13": _matrix(draw, 2 * width, hidden, dtype=dtype),
            f"{name}_w2": _matrix(draw, hidden, width, dtype=dtype, gain=2.0),
        }

    if moe is None:
        assert layer.dense_width is not None
        return block("dense", layer.dense_width)
    width = moe.expert_width
    found: Weights = {
        "gate": draw.normal(moe.experts, hidden) * hidden**-0.5,
        "experts_w13": _matrix(draw, moe.experts, 2 * width, hidden, dtype=dtype),
        "experts_w2": _matrix(draw, moe.experts, hidden, width, dtype=dtype, gain=2.0),
    }
    return found | (block("shared", moe.shared_width) if moe.shared_width else {})


def _matrix(
    draw: Draw, *shape: int, dtype: torch.dtype = torch.float32, gain: float = 1.0
) -> Weight:
    data = (draw.normal(*shape) * (gain * shape[-1] ** -0.5)).to(dtype)
    return Weight("bf16" if dtype == torch.bfloat16 else "fp32", shape, {"data": data})


def _norm(draw: Draw, width: int, dtype: torch.dtype) -> Tensor:
    return draw.uniform(width, low=0.7, high=1.3).to(dtype)


def _frequencies(spec: RopeSpec, draw: Draw) -> Tensor:
    learned = None
    if spec.lerope != "none":
        learned = draw.uniform(spec.dim // 2, low=0.9, high=1.1)
    return inv_freq(spec, learned)


def drafter(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The model with a drafter of two layers; ``changes`` are fields of ``DraftSpec``."""
    like = next(layer for layer in spec.layers if layer.rope is not None)
    assert like.rope is not None
    first = replace(
        like,
        index=0,
        ssmax=SSMaxSpec(),
        rope=replace(like.rope, lerope="none"),
        kv_source=0,
        topk_source=None,
        indexer=None,
        moe=None,
        dense_width=192,
    )
    draft = DraftSpec(
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        norm_eps=spec.norm_eps,
        layers=(first, replace(first, index=1, kv_source=1)),
        taps=(1, 5, 7),
        window=12,
        markov_rank=32,
    )
    draft = replace(draft, **changes)
    return replace(spec, draft=draft, taps=draft.taps)


def draft_weights(
    spec: ModelSpec, seed: int, dtype: torch.dtype, target: Mapping[str, Tensor | Weight]
) -> DraftWeights:
    """Dense weights of the drafter, which shares embedding and output with the target."""
    assert spec.draft is not None
    draft, draw = spec.draft, Draw(seed, f"{spec.name}/draft")
    hidden, rank = draft.hidden_size, draft.markov_rank
    top: Weights = {
        "embedding": target["embedding"],
        "output": target["output"],
        "fc": _matrix(draw, hidden, len(draft.taps) * hidden, dtype=dtype),
        "context_norm": _norm(draw, hidden, dtype),
        "mask_embeddings": draw.normal(draft.mask_rows, hidden, dtype=dtype),
        "norm": _norm(draw, hidden, dtype),
        "markov_w1": draw.normal(draft.vocab_size, rank, dtype=dtype),
        "markov_joint": _matrix(draw, 3 * rank, 2 * rank + hidden, dtype=dtype),
        "markov_joint_bias": (0.3 * draw.normal(3 * rank)).to(dtype),
        "markov_w2": _matrix(draw, draft.vocab_size, rank, dtype=dtype, gain=2.0),
    }
    return DraftWeights(top, tuple(layer_weights(one, draw, dtype) for one in draft.layers))


VISION = VisionSpec(
    hidden_size=72,
    layers=2,
    heads=3,
    head_dim=24,
    ffn_width=112,
    patch_size=4,
    channels=3,
    image_size=48,
    rope_theta=10000.0,
    spatial_merge_size=2,
    patch_merger=True,
    pre_projector_norm=True,
    adapter_bias=True,
    norm_eps=1e-5,
    output_size=CONFIG.hidden,
)


def vision_weights(spec: VisionSpec, seed: int, dtype: torch.dtype) -> VisionWeights:
    """Dense weights of an encoder."""
    draw = Draw(seed, "vision")
    width, out = spec.hidden_size, spec.output_size
    base = torch.arange(spec.head_dim // 2, dtype=torch.float64) * (-2.0 / spec.head_dim)
    frequencies = spec.rope_theta**base
    top: Weights = {
        "patch_conv": _matrix(draw, width, spec.patch_dim, dtype=dtype),
        "ln_pre": _norm(draw, width, dtype),
        "inv_freq": torch.cat((frequencies[0::2], frequencies[1::2])).float(),
        "adapter_in": _matrix(draw, out, width, dtype=dtype),
        "adapter_out": _matrix(draw, out, out, dtype=dtype),
    }
    if spec.pre_projector_norm:
        top["pre_projector_norm"] = _norm(draw, width, dtype)
    if spec.patch_merger:
        top["merging_layer"] = _matrix(draw, width, width * spec.cell_patches, dtype=dtype)
    if spec.adapter_bias:
        top["adapter_in_bias"] = (0.3 * draw.normal(out)).to(dtype)
        top["adapter_out_bias"] = (0.3 * draw.normal(out)).to(dtype)
    heads = spec.heads * spec.head_dim

    def layer() -> Weights:
        return {
            "attention_norm": _norm(draw, width, dtype),
            "ffn_norm": _norm(draw, width, dtype),
            "wqkv": _matrix(draw, 3 * heads, width, dtype=dtype, gain=1.5),
            "wo": _matrix(draw, width, heads, dtype=dtype),
            "w13": _matrix(draw, 2 * spec.ffn_width, width, dtype=dtype),
            "w2": _matrix(draw, width, spec.ffn_width, dtype=dtype),
        }

    return VisionWeights(top, tuple(layer() for _ in range(spec.layers)))
