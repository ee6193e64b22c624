"""The DSA indexer: its scores, its choice of keys, and what teaches it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ml4core.api import LayerSpec
from tools.train_tiny.layers import linear, matrix, rows_of
from tools.train_tiny.rotary import Places, require_learned_log, rotate, ssmax_factor

SSMAX_START = 0.144


def index_scores(q: Tensor, weights: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """As `Indexer.scores`, of head weights that are scaled already."""
    total = torch.zeros((), device=q.device)
    for head in range(q.shape[2]):  # one at a time: a quarter of the memory
        dots = (q[:, :, head] @ k.transpose(1, 2)).float().relu()
        total = total + dots * weights[:, :, head : head + 1]
    hidden = torch.arange(k.shape[1], device=k.device) > rows.unsqueeze(-1)
    return total.masked_fill(hidden, float("-inf"))


class Indexer(nn.Module):
    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        spec = layer.indexer
        assert spec is not None
        require_learned_log(spec.ssmax, "indexer.ssmax")
        if not (spec.query_norm and spec.query_input == "hidden" and spec.rope_interleaved):
            raise ValueError(f"indexer: {spec}; trained are a normed query of the hidden state")
        if spec.hadamard or spec.ssmax.bias:
            raise ValueError(f"indexer: {spec}; neither hadamard nor a bias of ssmax is trained")
        self.heads, self.dim, self.rope = spec.heads, spec.head_dim, spec.rope_dim
        self.topk, self.eps, self.scale = spec.topk, spec.norm_eps, spec.scale
        self.scored = index_scores
        hidden = layer.hidden_size
        self.wq = matrix(spec.heads * spec.head_dim, hidden)
        self.q_norm_weight = nn.Parameter(torch.ones(spec.head_dim))
        self.q_norm_bias = nn.Parameter(torch.zeros(spec.head_dim))
        self.wk = matrix(spec.head_dim, hidden)
        self.k_norm_weight = nn.Parameter(torch.ones(spec.head_dim))
        self.k_norm_bias = nn.Parameter(torch.zeros(spec.head_dim))
        self.weights_proj = matrix(spec.heads, hidden)
        self.ssmax_scale = nn.Parameter(torch.full((spec.heads,), SSMAX_START))

    def forward(
        self, h: Tensor, at: Places, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, Q, Hi, D], head weights [B, Q, Hi], k [B, T, D] of the normed state h [B, T, H].

        `rows` [B, Q]: positions whose queries are wanted; None: all.
        """
        k = self._norm(linear(h, self.wk), self.k_norm_weight, self.k_norm_bias).unsqueeze(-2)
        k = self._rotate(k, at.cos, at.sin).squeeze(-2).to(h.dtype)
        cos, sin, log_n = at
        if rows is not None:
            h, cos, sin, log_n = rows_of(h, rows), cos[rows], sin[rows], log_n[rows]
        q = linear(h, self.wq).unflatten(-1, (self.heads, self.dim))
        q = self._norm(q, self.q_norm_weight, self.q_norm_bias)
        q = self._rotate(q, cos, sin) * ssmax_factor(log_n, self.ssmax_scale, None)
        return q.to(h.dtype), linear(h, self.weights_proj).float(), k

    def scores(self, q: Tensor, weights: Tensor, k: Tensor, rows: Tensor) -> Tensor:
        """fp32 [B, Q, T]; -inf at keys after the query's position in `rows` [Q] or [B, Q]."""
        return self.scored(q, weights * self.scale, k, rows)

    def choose(self, h: Tensor, at: Places) -> Tensor:
        """bool [B, T, T]: the top-k keys of each query; all visible keys where there are fewer."""
        length = h.shape[1]
        rows = torch.arange(length, device=h.device)
        scores = self.scores(*self.forward(h, at), rows)
        causal = rows.unsqueeze(0) <= rows.unsqueeze(1)
        if length <= self.topk:
            return causal.expand(h.shape[0], -1, -1)
        least = scores.topk(self.topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
        above = scores > least
        # Of equal scores (zero, where no head's product is positive) the first positions.
        equal = scores == least
        left = self.topk - above.sum(-1, keepdim=True, dtype=torch.int32)
        return (above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= left))) & causal

    def loss(self, h: Tensor, at: Places, rows: Tensor, target: Tensor) -> Tensor:
        """KL(target || softmax of the scores), mean over queries.

        rows [B, Q]; target [B, Q, T] sums to 1.
        """
        scores = self.scores(*self.forward(h, at, rows), rows)
        logs = scores.log_softmax(-1)
        terms = torch.where(target > 0, target * (target.clamp(min=1e-20).log() - logs), 0.0)
        return terms.sum(-1).mean()

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.float(), (self.dim,), weight, bias, self.eps)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first dims of x, which is fp32."""
        if not self.rope:
            return x
        return torch.cat((rotate(x[..., : self.rope], cos, sin), x[..., self.rope :]), dim=-1)
