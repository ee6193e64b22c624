"""The stages of a decoder layer in fp64, on dense weights and on rows that caches hold.

A twin of the exact layer rounds the result of each op to the dtype of activations: what the best
composition at that dtype would lose. Its distance from the exact one is the measure of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ml4core.api import IndexerSpec, LayerSpec, SSMaxSpec, Weight
from ml4core_conformance.case import Pages
from ml4core_conformance.oracle import moe, norms, products
from ml4core_conformance.oracle import positions as positions_oracle
from ml4core_conformance.oracle.expected import Expected, Float, Selected
from ml4core_conformance.oracle.indexer import stored_query
from ml4core_conformance.oracle.numbers import decode_weight, wide


@dataclass(frozen=True)
class Rounding:
    """What becomes of an op's result: ``dtype`` is that of activations, None rounds nothing."""

    dtype: torch.dtype | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """A result in the dtype of activations."""
        return x if self.dtype is None else x.to(self.dtype).to(torch.float64)

    def wide(self, x: Tensor) -> Tensor:
        """A result that is fp32 whatever the dtype of activations."""
        return x if self.dtype is None else x.to(torch.float32).to(torch.float64)


EXACT = Rounding()


def values(weight: Tensor | Weight) -> Tensor:
    """The numbers of a tensor or weight, fp64."""
    return decode_weight(weight) if isinstance(weight, Weight) else wide(weight)


def _value(expected: Expected, name: str = "out") -> Tensor:
    found = expected.results[name]
    assert isinstance(found, Float)
    return found.value


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _value(norms.rms_norm({}, {"x": x, "weight": weight, "eps": eps}))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _value(norms.layer_norm({}, {"x": x, "weight": weight, "bias": bias, "eps": eps}))


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor, interleaved: bool) -> Tensor:
    """``x`` [T, N, R] turned by position * inv_freq[j] in pair j."""
    args = {"x": x, "positions": positions, "inv_freq": inv_freq, "interleaved": interleaved}
    return _value(positions_oracle.rope({}, {**args, "magnitude": 1.0}))


def ssmax(
    x: Tensor, positions: Tensor, spec: SSMaxSpec, scale: Tensor | None, bias: Tensor | None
) -> Tensor:
    """``x`` [T, N, D] times the factor of its position."""
    args = {"x": x, "positions": positions, "spec": spec, "scale": scale, "bias": bias}
    return _value(positions_oracle.ssmax({}, args))


def silu_mul(gate_up: Tensor) -> Tensor:
    return _value(products.silu_mul({}, {"gate_up": gate_up}))


def hadamard(x: Tensor) -> Tensor:
    """``x`` [..., D] times the normalised Hadamard matrix in Sylvester's order."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < x.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return x @ matrix * x.shape[-1] ** -0.5


def attend(
    q: Tensor, rows: Tensor, mask: Tensor, scale: float, latent: int
) -> tuple[Tensor, Tensor]:
    """Absorbed queries [T, N, W] over rows [S, width] under a mask [T, S]: out [T, N, L], lse.

    What no query sees may hold anything. A query without a key gives 0 and -inf.
    """
    # All rows at once, and without the bounds that the oracle of the op has: passes are long.
    rows = torch.where(mask.any(0).unsqueeze(-1), rows, 0.0)
    scores = (q.flatten(0, 1) @ rows[:, : q.shape[-1]].T).unflatten(0, q.shape[:2]) * scale
    scores = scores.masked_fill(~mask.unsqueeze(1), -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    return weights @ rows[:, :latent], lse


def index_scores(q: Tensor, weights: Tensor, scale: float, keys: Tensor, fp8: bool) -> Tensor:
    """Scores [T, S] of index queries [T, Hi, D] with weights [T, Hi] against keys [S, D]; queries
    are quantised as ``fp8`` keys are.
    """
    q = stored_query(q, _FP8_KEYS) if fp8 else q
    dots = torch.einsum("thd,sd->ths", q, keys).clamp(min=0)
    return torch.einsum("th,ths->ts", weights * scale, dots)


_FP8_KEYS = Pages("planar_f32", 1, ())
"""Stands for any cache of FP8 index keys."""


def router(
    x: Tensor, weight: Tensor, topk: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and ids [T, topk] of rows [T, H], and how far the last chosen logit [T] is above the
    first that is not.
    """
    args = {"x": x, "weight": weight, "topk": topk}
    found = moe.router({}, {**args, "renormalize": renormalize, "routed_scale": scale})
    picked = found.results["ids"]
    assert isinstance(picked, Selected)
    if topk == weight.shape[0]:
        margin = torch.full((len(x),), math.inf, dtype=torch.float64)
    else:
        best = picked.scores.topk(topk + 1).values
        margin = best[:, -2] - best[:, -1]
    return _value(found, "weights"), picked.value, margin


class Index(NamedTuple):
    """What an indexer makes: queries [T, Hi, D], weights [T, Hi], and the keys [T, D] to store."""

    q: Tensor
    weights: Tensor
    key: Tensor

    def scores(self, spec: IndexerSpec, keys: Tensor, fp8: bool) -> Tensor:
        """Of stored keys [S, D]: [T, S]."""
        return index_scores(self.q, self.weights, spec.scale, keys, fp8)


class Inputs(NamedTuple):
    """What ``attn_inputs`` makes. ``row`` is the latent row to store; None where the layer owns
    none, as ``indexed``.
    """

    q: Tensor
    row: Tensor | None
    indexed: Index | None


class LayerOracle:
    """The stages of one layer. ``weights`` have the names of ``LAYER_WEIGHTS`` and are dense."""

    def __init__(
        self,
        spec: LayerSpec,
        weights: Mapping[str, Tensor | Weight],
        rounding: Rounding = EXACT,
    ) -> None:
        self.spec = spec
        self.rounded = rounding
        self.w = {name: values(weight) for name, weight in weights.items()}

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return self.rounded(rms_norm(x, self.w[name], eps))

    def inputs(self, residual: Tensor, hidden: Tensor | None, positions: Tensor) -> Inputs:
        """Of the residual [T, H], or of its norm where the stage before has made it already."""
        spec, r, w = self.spec, self.rounded, self.w
        if hidden is None:
            hidden = self.norm(residual, "attention_norm", spec.norm_eps)
        source = hidden
        if spec.q_lora_rank is None:
            q = r(hidden @ w["wq"].T)
        else:
            source = self.norm(r(hidden @ w["wq_a"].T), "q_a_norm", spec.norm_eps)
            q = r(source @ w["wq_b"].T)
        q = q.unflatten(-1, (spec.heads, spec.q_dim))
        q_nope, q_pe = q.split([spec.nope_dim, spec.rope_dim], -1)
        if spec.rope is not None:
            q_pe = r(rope(q_pe, positions, w["inv_freq"], spec.rope.interleaved))
        if spec.ssmax.kind != "none":
            learned = (w.get("ssmax_scale"), w.get("ssmax_bias"))
            q_nope, q_pe = (r(ssmax(x, positions, spec.ssmax, *learned)) for x in (q_nope, q_pe))
        q_latent = r(torch.einsum("tnp,nlp->tnl", q_nope, w["w_uk"]))
        row = self.row(hidden, positions) if spec.owns_kv else None
        index = None
        if spec.indexer is not None:
            index = self._index(spec.indexer, hidden, source, positions)
        return Inputs(torch.cat((q_latent, q_pe), -1), row, index)

    def row(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The latent row [T, L + R] of normed states [T, H]."""
        spec, r, w = self.spec, self.rounded, self.w
        both = r(hidden @ w["wkv_a"].T)
        latent, k_pe = both.split([spec.kv_lora_rank, spec.rope_dim], -1)
        latent = self.norm(latent, "kv_a_norm", spec.norm_eps)
        if spec.rope is not None:
            turned = rope(k_pe.unsqueeze(1), positions, w["inv_freq"], spec.rope.interleaved)
            k_pe = r(turned).squeeze(1)
        return torch.cat((latent, k_pe), -1)

    def _index(self, spec: IndexerSpec, hidden: Tensor, source: Tensor, positions: Tensor) -> Index:
        w, r = self.w, self.rounded.wide
        q_input = hidden if spec.query_input == "hidden" else source
        q = r(q_input @ w["index_wq"].T).unflatten(-1, (spec.heads, spec.head_dim))
        if spec.query_norm:
            norm = (w["index_q_norm_weight"], w["index_q_norm_bias"])
            q = r(layer_norm(q, *norm, spec.norm_eps))
        k = r(hidden @ w["index_wk"].T).unsqueeze(1)
        k = r(layer_norm(k, w["index_k_norm_weight"], w["index_k_norm_bias"], spec.norm_eps))
        weights = r(hidden @ w["index_weights_proj"].T)
        if spec.rope_dim:
            q, k = (self._turned(x, spec, positions) for x in (q, k))
        if spec.hadamard:
            q, k = r(hadamard(q)), r(hadamard(k))
        if spec.ssmax.kind != "none":
            learned = (w.get("index_ssmax_scale"), w.get("index_ssmax_bias"))
            q = r(ssmax(q, positions, spec.ssmax, *learned))
        return Index(q, weights, k.squeeze(1))

    def _turned(self, x: Tensor, spec: IndexerSpec, positions: Tensor) -> Tensor:
        head, tail = x[..., : spec.rope_dim], x[..., spec.rope_dim :]
        head = rope(head, positions, self.w["inv_freq"], spec.rope_interleaved)
        return torch.cat((self.rounded.wide(head), tail), -1)

    def attention(self, q: Tensor, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The stage ``sparse_mla`` over rows [S, width] that a mask [T, S] names."""
        spec = self.spec
        out, lse = attend(q, rows, mask, spec.softmax_scale, spec.kv_lora_rank)
        return self.rounded(out), self.rounded.wide(lse)

    def output(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The stage ``attn_output``."""
        r, w = self.rounded, self.w
        heads = r(torch.einsum("tnl,nvl->tnv", out, w["w_uv"]))
        residual = r(residual + r(heads.flatten(1) @ w["wo"].T))
        return residual, self.norm(residual, "ffn_norm", self.spec.norm_eps)

    def ffn(
        self, residual: Tensor, hidden: Tensor, next_norm: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The stage ``ffn``, and the router's margin [T], infinite on a dense layer."""
        spec, r = self.spec, self.rounded
        margin = torch.full((len(hidden),), math.inf, dtype=torch.float64)
        if spec.moe is None:
            out = self._block(hidden, self.w["dense_w13"], self.w["dense_w2"])
        else:
            moe_spec, w = spec.moe, self.w
            weights, ids, margin = router(
                hidden, w["gate"], moe_spec.topk, moe_spec.renormalize, moe_spec.routed_scale
            )
            weights = r.wide(weights)
            total = torch.zeros_like(hidden)
            for expert in range(moe_spec.experts):
                share = torch.where(ids == expert, weights, 0.0).sum(-1, keepdim=True)
                inner = r(silu_mul(hidden @ w["experts_w13"][expert].T))
                total += share * (inner @ w["experts_w2"][expert].T)
            out = r(total)
            if moe_spec.shared_width:
                out = r(out + self._block(hidden, w["shared_w13"], w["shared_w2"]))
        residual = r(residual + out)
        normed = None
        if next_norm is not None:
            normed = r(rms_norm(residual, values(next_norm), spec.norm_eps))
        return residual, normed, margin

    def _block(self, x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        r = self.rounded
        return r(r(silu_mul(r(x @ w13.T))) @ w2.T)
