"""Memory of a rank beside weights and caches: what a step needs, graphs, and the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ml4core.api import LayerSpec, ModelSpec
from ml4core.engine.image_limits import KEPT_ROWS
from ml4core.planning.ranks import Ranks

GIB = 2**30
RUNTIME = 2 * GIB
"""The device's context, libraries, and buffers of collectives. An assumption."""
GRAPHS = 1 * GIB
"""Captured graphs, where any are. An assumption."""
SCORES = GIB // 2
"""Index scores of a step are made in tiles of at most so many bytes. An assumption."""


@dataclass(frozen=True)
class Reserve:
    """Bytes by what they are for, and the formula of each in words."""

    terms: Mapping[str, int]
    formulas: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(self.terms.values())


def stated(nbytes: int) -> Reserve:
    """What the operator says it is."""
    return Reserve({"stated": nbytes}, {"stated": "as given"})


def estimate(
    spec: ModelSpec,
    ranks: Ranks,
    value_bytes: int,
    rows: int,
    sequences: int,
    longest: int,
    drafts: int = 0,
    drawn: bool = False,
    images: bool = False,
    graphs: bool = True,
) -> Reserve:
    """The reserve of a step of ``rows`` tokens for up to ``sequences`` requests of up to
    ``longest`` tokens, with ``drafts`` drafts each; ``drawn``: their law is kept until they are
    judged.

    ``value_bytes`` is the size of an activation. Numbers and formulas are told together; the
    constants are this module's.
    """
    b, hidden = value_bytes, spec.hidden_size
    wide = max(_widest(layer, ranks) for layer in spec.layers)
    topk = max((layer.indexer.topk for layer in spec.layers if layer.indexer), default=0)
    logits = sequences * (1 + drafts)
    terms = {
        "residual stream": 4 * rows * hidden * b,
        "widest stage": rows * wide * b,
        "selection": rows * topk * 8 + (min(rows * longest * 4, SCORES) if topk else 0),
        "taps": rows * len(spec.taps) * hidden * b if drafts else 0,
        "logits": 2 * logits * spec.vocab_size * 4,
        "draft logits": (2 if drawn else 1) * sequences * drafts * spec.vocab_size * 4,
        "images": _images(spec, b) if images else 0,
        "graphs": GRAPHS if graphs else 0,
        "runtime": RUNTIME,
    }
    formulas = {
        "residual stream": f"4 x {rows:,} rows x {hidden:,} x {b} B",
        "widest stage": f"{rows:,} rows x {wide:,} x {b} B",
        "selection": f"{rows:,} rows x {topk:,} x 8 B, and scores of 4 B x {longest:,} in tiles of "
        f"at most {SCORES / GIB:g} GiB",
        "taps": f"{rows:,} rows x {len(spec.taps)} x {hidden:,} x {b} B",
        "logits": f"2 x {logits:,} rows x {spec.vocab_size:,} x 4 B",
        "draft logits": f"{2 if drawn else 1} x {sequences * drafts:,} drafts x "
        f"{spec.vocab_size:,} x 4 B",
        "images": f"patches of one image x (4 x width + 3 x feed-forward width) x {b} B, and "
        f"{KEPT_ROWS:,} embeddings x {hidden:,} x {b} B",
        "graphs": "a constant",
        "runtime": "a constant",
    }
    terms = {name: size for name, size in terms.items() if size}
    return Reserve(terms, {name: formulas[name] for name in terms})


def _widest(layer: LayerSpec, ranks: Ranks) -> int:
    """Values a row of the stage that holds most at once."""
    heads = layer.heads // ranks.tp
    gathered = heads * ranks.dcp  # heads of which context parallel ranks make partial results
    attention = heads * (layer.q_dim + layer.v_dim)
    attention += gathered * (layer.absorbed_dim + layer.kv_lora_rank)
    if layer.moe is None:
        assert layer.dense_width is not None  # a layer is dense or MoE
        return max(attention, 3 * layer.dense_width // ranks.tp)
    moe = layer.moe
    # w1 and w3, their product, and the result, of each chosen expert.
    routed = moe.topk * (3 * moe.expert_width // ranks.expert_width + layer.hidden_size)
    return max(attention, routed + 3 * moe.shared_width // ranks.tp)


def _images(spec: ModelSpec, value_bytes: int) -> int:
    vision = spec.vision
    if vision is None:
        return 0
    side = -(-vision.image_size // vision.cell_size) * vision.spatial_merge_size
    encoding = side * side * (4 * vision.hidden_size + 3 * vision.ffn_width)
    return (encoding + KEPT_ROWS * spec.hidden_size) * value_bytes
