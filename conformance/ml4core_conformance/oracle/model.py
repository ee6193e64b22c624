"""A whole decoder in fp64: one request, all of its rows at once, no pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ml4core.api import ModelSpec, Weight
from ml4core_conformance.oracle.stages import (
    EXACT,
    LayerOracle,
    Rounding,
    rms_norm,
    values,
)

Store = Callable[[Tensor], Tensor]
"""Rows [T, width] to what a cache gives back of them."""


@dataclass
class Passed:
    """What one pass saw.

    Attributes:
        logits: [T, vocab].
        made: by owner, the latent rows [T, L + R] to store.
        rows: the same as stored.
        keys: by owner, the index keys as stored [T, D].
        chosen: by owner, which positions each row selects, bool [T, T].
        taps: the residual [T, H] after each tapped layer.
        router_margin: the least distance between a chosen expert's logit and one that isn't.
        index_margin: the same of selected keys' scores, as a share of the largest of the row.
    """

    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    made: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    taps: list[Tensor] = field(default_factory=list)
    router_margin: float = math.inf
    index_margin: float = math.inf


class ModelOracle:
    """A decoder of dense weights: ``top`` has the names of ``GLOBAL_WEIGHTS``.

    Attributes:
        store_row, store_key: what the caches do to a row; None keeps it.
        held: by owner, latent rows [T, L + R] that a cache was seen to hold: what comes after is
            computed on them, not on what ``store_row`` says.
        index_fp8: whether index queries are quantised as keys are.
        sources: by layer, whose selection it uses; None takes the spec's. To compare with a wrong
            one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        top: Mapping[str, Tensor | Weight],
        layers: Sequence[Mapping[str, Tensor | Weight]],
        *,
        rounding: Rounding = EXACT,
        store_row: Store | None = None,
        store_key: Store | None = None,
        held: Mapping[int, Tensor] | None = None,
        index_fp8: bool = False,
        sources: Mapping[int, int] | None = None,
    ) -> None:
        self.spec = spec
        self.rounding = rounding
        self.embedding, self.final_norm, self.output = (
            values(top[name]) for name in ("embedding", "final_norm", "output")
        )
        self.layers = [
            LayerOracle(one, weights, rounding)
            for one, weights in zip(spec.layers, layers, strict=True)
        ]
        self.store_row = store_row or _kept
        self.store_key = store_key or _kept
        self.held = {} if held is None else held
        self.index_fp8 = index_fp8
        self.sources = {} if sources is None else sources

    def run(self, ids: Sequence[int], images: Tensor | None = None) -> Passed:
        """A pass over token ids from position 0 on. ``images`` [T, H] holds what stands for a
        row's token, and NaN in rows whose tokens stand for themselves.
        """
        r, passed = self.rounding, Passed()
        positions = torch.arange(len(ids))
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        residual, hidden = r(self.embedding[torch.tensor(ids)]), None
        if images is not None:
            residual = torch.where(images.isnan(), residual, r(images))
        norms = [layer.w["attention_norm"] for layer in self.layers[1:]] + [self.final_norm]
        for layer, next_norm in zip(self.layers, norms, strict=True):
            spec = layer.spec
            made = layer.inputs(residual, hidden, positions)
            if made.row is not None:
                passed.made[spec.index] = row = self._padded(made.row)
                seen = self.held.get(spec.index)
                passed.rows[spec.index] = self.store_row(row) if seen is None else seen
            if made.indexed is not None and spec.indexer is not None:
                passed.keys[spec.index] = keys = self.store_key(made.indexed.key)
                scores = made.indexed.scores(spec.indexer, keys, self.index_fp8)
                passed.chosen[spec.index], margin = select(scores, causal, spec.indexer.topk)
                passed.index_margin = min(passed.index_margin, margin)
            source = self.sources.get(spec.index, spec.topk_source)
            mask = causal if source is None else passed.chosen[source]
            out, _ = layer.attention(made.q, passed.rows[spec.kv_source], mask)
            residual, hidden = layer.output(out, residual)
            residual, hidden, margins = layer.ffn(residual, hidden, next_norm)
            passed.router_margin = min(passed.router_margin, float(margins.min()))
            if spec.index in self.spec.taps:
                passed.taps.append(residual)
        assert hidden is not None
        passed.logits = r.wide(hidden @ self.output.T)
        return passed

    def _padded(self, row: Tensor) -> Tensor:
        """Rows of layers without rope have a rope part of zeros in the cache."""
        width = max(layer.kv_lora_rank + layer.rope_dim for layer in self.spec.layers)
        return torch.nn.functional.pad(row, (0, width - row.shape[-1]))

    def final(self, residual: Tensor) -> Tensor:
        """Logits of residuals [T, H] after the last layer."""
        return rms_norm(residual, self.final_norm, self.spec.norm_eps) @ self.output.T


def select(scores: Tensor, causal: Tensor, topk: int) -> tuple[Tensor, float]:
    """Which keys [T, T] each row chooses, ties to the lowest position; and the least margin."""
    scores = scores.masked_fill(~causal, -math.inf)
    order = torch.sort(scores, dim=-1, descending=True, stable=True)
    kept = min(topk, scores.shape[-1])
    chosen = torch.zeros_like(causal).scatter(-1, order.indices[:, :kept], True) & causal
    margin = math.inf
    if kept < scores.shape[-1]:
        full = causal.sum(-1) > topk
        if full.any():
            last, next = order.values[:, kept - 1], order.values[:, kept]
            # Scores of which every part is cut off at 0 tie at any precision.
            gap = torch.where((last == 0) & (next == 0), math.inf, last - next)[full]
            size = torch.where(causal, scores, 0.0).abs().amax(-1)[full]
            margin = float((gap / size).min())
    return chosen, margin


def _kept(rows: Tensor) -> Tensor:
    return rows
