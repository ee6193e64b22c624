"""The drafter in float64 and plain loops: keys and values a head, one row and one key at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ml4core.api import DraftSpec, DraftWeights, LayerSpec, Weight

Rows = dict[int, Tensor]
"""Position -> the row [L + R] that a cache holds there."""


def wide(value: Any) -> Tensor:
    return (value.data if isinstance(value, Weight) else value).to(torch.float64)


def rms(x: Tensor, weight: Any, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * wide(weight)


def rotate(x: Tensor, position: int, inv_freq: Tensor, interleaved: bool) -> Tensor:
    out = x.clone()
    half = x.numel() // 2
    for j in range(half):
        a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
        angle = position * float(inv_freq[j])
        cos, sin = math.cos(angle), math.sin(angle)
        out[a] = x[a] * cos - x[b] * sin
        out[b] = x[a] * sin + x[b] * cos
    return out


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


class Reference:
    def __init__(self, spec: DraftSpec, weights: DraftWeights) -> None:
        self.spec = spec
        self.top = {name: wide(value) for name, value in weights.top.items()}
        self.layers = [
            {name: wide(value) for name, value in layer.items()} for layer in weights.layers
        ]

    def context_rows(self, taps: Sequence[Tensor], position: int) -> list[Tensor]:
        """The row that each layer makes of one token's taps [H] each."""
        state = self.top["fc"] @ torch.cat([wide(tap) for tap in taps])
        state = rms(state, self.top["context_norm"], self.spec.norm_eps)
        return [
            self.row(layer, w, state, position)
            for layer, w in zip(self.spec.layers, self.layers, strict=True)
        ]

    def row(self, layer: LayerSpec, w: Mapping[str, Tensor], x: Tensor, position: int) -> Tensor:
        both = w["wkv_a"] @ x
        latent = rms(both[: layer.kv_lora_rank], w["kv_a_norm"], layer.norm_eps)
        rope = both[layer.kv_lora_rank :]
        if layer.rope is not None:
            rope = rotate(rope, position, w["inv_freq"], layer.rope.interleaved)
        return torch.cat([latent, rope])

    def seen(self, i: int, anchor_position: int) -> list[int]:
        """The positions that row i of a block sees, by the definition of the window."""
        depth, window, p = self.spec.depth, self.spec.window, anchor_position
        q = p + i
        if window is None:
            return list(range(p + depth))
        if self.spec.window_mode == "row":
            return [j for j in range(p + depth) if abs(q - j) < window]
        return [j for j in range(p) if j >= p - window] + list(range(p, p + depth))

    def inputs(self, anchor: int) -> list[Tensor]:
        spec, embedding = self.spec, self.top["embedding"][anchor]
        masks = self.top.get("mask_embeddings")
        if spec.anchor_vector == "none":
            return [embedding] + [masks[i - 1] for i in range(1, spec.depth)]
        first = embedding + masks[0] if spec.anchor_vector == "add" else masks[0]
        return [first] + [masks[i] for i in range(1, spec.depth)]

    def backbone(
        self, anchor: int, p: int, context: Sequence[Rows]
    ) -> tuple[list[Tensor], list[Rows]]:
        """The residual of each row after the last layer; and each layer's rows of the block."""
        xs = self.inputs(anchor)
        written = []
        for layer, w, rows in zip(self.spec.layers, self.layers, context, strict=True):
            hidden = [rms(x, w["attention_norm"], layer.norm_eps) for x in xs]
            block = {p + i: self.row(layer, w, h, p + i) for i, h in enumerate(hidden)}
            written.append(block)
            everything = {**{j: r for j, r in rows.items() if j < p}, **block}
            xs = [
                x + self.attend(layer, w, h, p + i, [everything[j] for j in self.seen(i, p)])
                for i, (x, h) in enumerate(zip(xs, hidden, strict=True))
            ]
            xs = [x + self.ffn(layer, w, rms(x, w["ffn_norm"], layer.norm_eps)) for x in xs]
        return xs, written

    def attend(
        self,
        layer: LayerSpec,
        w: Mapping[str, Tensor],
        x: Tensor,
        position: int,
        rows: Sequence[Tensor],
    ) -> Tensor:
        if layer.q_lora_rank is None:
            q = w["wq"] @ x
        else:
            q = w["wq_b"] @ rms(w["wq_a"] @ x, w["q_a_norm"], layer.norm_eps)
        values = []
        for n, head in enumerate(q.view(layer.heads, -1)):
            q_nope, q_pe = head[: layer.nope_dim], head[layer.nope_dim :]
            if layer.rope is not None:
                q_pe = rotate(q_pe, position, w["inv_freq"], layer.rope.interleaved)
            scores, heads_values = [], []
            for row in rows:
                latent, k_pe = row[: layer.kv_lora_rank], row[layer.kv_lora_rank :]
                k_nope = w["w_uk"][n].T @ latent
                score = float(q_nope @ k_nope + q_pe @ k_pe)
                scores.append(score * layer.softmax_scale)
                heads_values.append(w["w_uv"][n] @ latent)
            top = max(scores)
            odds = [math.exp(score - top) for score in scores]
            total = sum(odds)
            values.append(sum(o / total * v for o, v in zip(odds, heads_values, strict=True)))
        return w["wo"] @ torch.cat(values)

    def ffn(self, layer: LayerSpec, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        def swiglu(w13: Tensor, w2: Tensor) -> Tensor:
            gate, up = (w13 @ x).chunk(2)
            return w2 @ (silu(gate) * up)

        if layer.moe is None:
            return swiglu(w["dense_w13"], w["dense_w2"])
        odds = torch.softmax(w["gate"] @ x, 0)
        chosen = sorted(range(layer.moe.experts), key=lambda e: -float(odds[e]))[: layer.moe.topk]
        total = sum(float(odds[e]) for e in chosen) if layer.moe.renormalize else 1.0
        out = torch.zeros_like(x)
        for e in chosen:
            share = float(odds[e]) / total * layer.moe.routed_scale
            out += share * swiglu(w["experts_w13"][e], w["experts_w2"][e])
        if layer.moe.shared_width:
            out += swiglu(w["shared_w13"], w["shared_w2"])
        return out

    def logits(self, anchor: int, residuals: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
        """Logits [depth, vocab] of the sequential head, which draws `tokens` [depth]."""
        spec, top = self.spec, self.top
        state = torch.zeros(spec.markov_rank, dtype=torch.float64)
        previous, out = anchor, []
        for residual, token in zip(residuals, tokens, strict=True):
            normed = rms(residual, top["norm"], spec.layers[-1].norm_eps)
            given = normed if spec.normed_head_input else residual
            z = torch.cat([state, top["markov_w1"][previous], given])
            joint = top["markov_joint"] @ z + top["markov_joint_bias"]
            gate, candidate, output = joint.chunk(3)
            gate = 1 / (1 + torch.exp(-gate))
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            out.append(top["output"] @ normed + top["markov_w2"] @ torch.tanh(output))
            previous = token
        return torch.stack(out)

    def draft(
        self, anchor: int, p: int, context: Sequence[Rows], tokens: Sequence[int]
    ) -> tuple[Tensor, list[Rows]]:
        """Logits [depth, vocab] given the drafts `tokens`; and each layer's rows of the block."""
        residuals, written = self.backbone(anchor, p, context)
        return self.logits(anchor, residuals, tokens), written
