"""The decoder's forward: a pure function of tensors at fixed shapes. The one loop over layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ml4core.api import KVCache, LayerKV, Selection, StepOutput, StepPlan
from ml4core.compose.bind import BoundModel
from ml4core.compose.vocabulary import embeddings, vocabulary_logits


class ModelWeights(NamedTuple):
    """Weights as the session laid them out: ``GLOBAL_WEIGHTS`` by name, and ``LAYER_WEIGHTS`` of
    each layer.
    """

    top: Mapping[str, Any]
    layers: tuple[Mapping[str, Any], ...]


class KVState(NamedTuple):
    """The caches by owning layer. A consumer has none: it is given its owner's."""

    latent: Mapping[int, KVCache]
    index_keys: Mapping[int, KVCache]


def forward(bound: BoundModel, weights: ModelWeights, plan: StepPlan, kv: KVState) -> StepOutput:
    """Runs one step. Writes the rows' keys into ``kv`` and changes nothing else.

    A selection lives for this call only, from its owner to the last layer that uses it.
    """
    spec, ops, ranks = bound.model, bound.ops, bound.collectives
    # The table has the dtype that the session keeps it in.
    residual = embeddings(ops, plan.token_ids, weights.top["embedding"], ranks).to(bound.dtype)
    if plan.image_index is not None and plan.image_embeddings is not None:
        index = plan.image_index.unsqueeze(-1)
        images = plan.image_embeddings[plan.image_index.clamp(min=0)].to(bound.dtype)
        residual = torch.where(index >= 0, images, residual)
    hidden: Tensor | None = None
    selections: dict[int, Selection] = {}  # by owner
    last_user = {layer.topk_source: layer.index for layer in spec.layers}
    taps: dict[int, Tensor] = {}
    real = plan.visible > 0
    fault = torch.zeros((), dtype=torch.bool, device=residual.device)
    for layer, call in zip(spec.layers, bound.layers, strict=True):
        last = layer.index + 1 == len(spec.layers)
        next_norm = (
            weights.top["final_norm"] if last else weights.layers[layer.index + 1]["attention_norm"]
        )
        caches = LayerKV(kv.latent[layer.kv_source], kv.index_keys.get(layer.index))
        source = layer.topk_source
        shared = None if source is None or layer.owns_index else selections[source]
        residual, hidden, selection = call(
            weights.layers[layer.index], plan, caches, residual, hidden, shared, next_norm
        )
        if layer.owns_index:
            if selection is None:
                raise RuntimeError(f"layer {layer.index} owns an index but returned no selection")
            selections[layer.index] = selection
            fault = fault | (selection.has_nan & real).any()
        if source is not None and last_user[source] == layer.index:
            del selections[source]
        if layer.index in spec.taps:
            taps[layer.index] = residual
    if hidden is None:
        raise RuntimeError(
            "the last layer returned no normed state although it was given the final norm"
        )
    wanted = hidden[plan.logits_indices]
    logits = vocabulary_logits(ops, wanted, weights.top["output"], spec.vocab_size, ranks)
    fault = fault | (logits.isnan().any(-1) & real[plan.logits_indices]).any()
    return StepOutput(logits, tuple(taps[i] for i in spec.taps), fault)
