"""A model's table, sizes and open choices as plain data, for whoever prints them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ml4core.api import LayerSpec, ModelSpec
from ml4core.models.positions import mscale
from ml4core.models.tensor_table import expected_tensors
from ml4core.models.tensors import TensorReport, format_counts


@dataclass(frozen=True)
class RowBytes:
    """Bytes a token of one layer's latent cache and of one layer's index cache."""

    latent: int
    index: int


def kv_bytes_per_token(spec: ModelSpec, row: RowBytes) -> int:
    """Bytes a token over all layers: only owners store a latent, only indexers a key."""
    return len(spec.kv_owners) * row.latent + len(spec.index_owners) * row.index


def parameters(spec: ModelSpec) -> dict[str, int]:
    """Counts of the decoder's parameters.

    `total`, with the embedding and the output; `embedding`, these two together (once if tied);
    `active`, what one token multiplies with: of the routed experts only those chosen, no embedding.
    """
    total = embedding = routed = 0
    for entry in expected_tensors(spec).values():
        if not entry.used:
            continue
        count = math.prod(entry.shapes[0])
        total += count
        if entry.role in ("embedding", "output"):
            embedding += count
        elif entry.role.startswith("experts_"):
            routed += count
    chosen = sum(
        3 * layer.moe.topk * layer.moe.expert_width * layer.hidden_size
        for layer in spec.layers
        if layer.moe is not None
    )
    active = total - embedding - routed + chosen
    return {"total": total, "embedding": embedding, "active": active}


def describe(
    spec: ModelSpec,
    report: TensorReport | None = None,
    rows: Mapping[str, RowBytes] | None = None,
) -> dict[str, Any]:
    """All there is to say about a model, as JSON-able data.

    `report` adds what lies in the checkpoint; `rows`, cache rows by name, adds bytes a token.
    """
    described: dict[str, Any] = {
        "name": spec.name,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "max_position": spec.max_position,
        "norm_eps": spec.norm_eps,
        "tied_embeddings": spec.tied_embeddings,
        "taps": list(spec.taps),
        "parameters": parameters(spec),
        "rope": _rope(spec),
        "layers": [_layer(layer) for layer in spec.layers],
        "kv": {
            "latent_owners": len(spec.kv_owners),
            "index_owners": len(spec.index_owners),
            "bytes_per_token": {
                name: kv_bytes_per_token(spec, row) for name, row in (rows or {}).items()
            },
        },
        "assumptions": dict(spec.assumptions),
        "other_blocks": sorted(spec.extras),
    }
    if report is not None:
        described["checkpoint"] = {
            "bytes": report.nbytes,
            "formats": {
                name: {"matrices": count, "bytes": size}
                for name, (count, size) in format_counts(report).items()
            },
            "unused_parts": {
                part: {"tensors": count, "bytes": size}
                for part, (count, size) in report.unused_parts.items()
            },
            "notes": list(report.notes),
        }
    return described


def _rope(spec: ModelSpec) -> dict[str, Any] | None:
    rope = next((layer.rope for layer in spec.layers if layer.rope is not None), None)
    if rope is None:
        return None
    yarn = rope.yarn
    correction = mscale(yarn.factor) ** 2 if yarn is not None and yarn.apply_scale else 1.0
    return {
        "dim": rope.dim,
        "theta": rope.theta,
        "interleaved": rope.interleaved,
        "yarn": None
        if yarn is None
        else {
            "factor": yarn.factor,
            "original_max_position": yarn.original_max_position,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        },
        "learned": rope.lerope,
        "learned_scope": rope.lerope_scope if rope.lerope != "none" else None,
        "softmax_scale_factor": correction,
    }


def _layer(layer: LayerSpec) -> dict[str, Any]:
    indexer, moe = layer.indexer, layer.moe
    return {
        "index": layer.index,
        "kind": layer.kind,
        "heads": layer.heads,
        "nope_dim": layer.nope_dim,
        "rope_dim": layer.rope_dim,
        "v_dim": layer.v_dim,
        "kv_lora_rank": layer.kv_lora_rank,
        "q_lora_rank": layer.q_lora_rank,
        "softmax_scale": layer.softmax_scale,
        "ssmax": layer.ssmax.kind,
        "kv_source": layer.kv_source,
        "topk_source": layer.topk_source,
        "topk": indexer.topk if indexer is not None else None,
        "index_heads": indexer.heads if indexer is not None else None,
        "dense_width": layer.dense_width,
        "experts": moe.experts if moe is not None else None,
        "experts_per_token": moe.topk if moe is not None else None,
        "expert_width": moe.expert_width if moe is not None else None,
        "shared_width": moe.shared_width if moe is not None else None,
    }
