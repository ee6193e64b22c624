"""How a layer tells positions apart: rotary embedding, its extension, and the softmax scale."""

from __future__ import annotations

import math

from ml4core.api import RopeSpec, YarnSpec
from ml4core.models.assumptions import Choices, Evidence
from ml4core.models.evidence import Tensors
from ml4core.models.params import LeRoPE, Params, Yarn

BETA_FAST = 32.0  # rotations over the original context; the family's values
BETA_SLOW = 1.0


def rope_spec(p: Params, tensors: Tensors, choices: Choices) -> RopeSpec:
    """The rotary embedding of every rope layer."""
    per_layer = bool(tensors.layers_with("attention.rope_freqs"))
    here = per_layer or tensors.has("rope_freqs")
    rope = RopeSpec(
        dim=p.qk_rope_head_dim,
        theta=choices.take("rope_theta", p.rope_theta),
        interleaved=p.rope_interleave,
        yarn=_yarn(p.yarn, choices) if p.yarn is not None else None,
    )
    if p.lerope is None and not here:
        return rope
    source = "layers.*.attention.rope_freqs" if per_layer else "rope_freqs"
    seen = Evidence("layer" if per_layer else "global", f"{source} being here")
    stated = p.lerope or LeRoPE()
    return RopeSpec(
        dim=rope.dim,
        theta=rope.theta,
        interleaved=rope.interleaved,
        yarn=rope.yarn,
        lerope=choices.take("lerope.storage", stated.storage),
        lerope_scope=choices.take("lerope.scope", stated.scope, seen=seen if here else None),
    )


def _yarn(block: Yarn, choices: Choices) -> YarnSpec:
    return YarnSpec(
        factor=block.factor,
        original_max_position=_original(block, choices),
        beta_fast=BETA_FAST if block.beta is None else block.beta,
        beta_slow=BETA_SLOW if block.alpha is None else block.alpha,
        apply_scale=choices.take("yarn.apply_scale", block.apply_scale),
    )


def _original(block: Yarn, choices: Choices) -> int:
    return choices.take(
        "yarn.original_max_position_embeddings", block.original_max_position_embeddings
    )


def mscale(factor: float) -> float:
    """YaRN's magnitude correction."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(nope_dim: int, rope: RopeSpec | None) -> float:
    """(q.k width of the un-absorbed head)^-0.5, and YaRN's magnitude squared where it applies.

    YaRN corrects rotated queries only: without `rope`, on NoPE layers, it has no share.
    """
    if rope is None:
        return float(nope_dim**-0.5)
    scale = float((nope_dim + rope.dim) ** -0.5)
    if rope.yarn is not None and rope.yarn.apply_scale:
        scale *= mscale(rope.yarn.factor) ** 2
    return scale


def max_position(p: Params, choices: Choices) -> int:
    """Positions the model is made for: as stated, else YaRN's factor times the original context."""
    stated = p.max_position_embeddings or p.max_seq_len
    if stated is not None:
        return stated
    assert p.yarn is not None  # one of the three is there, by the checks of the file
    return int(_original(p.yarn, choices) * p.yarn.factor)
