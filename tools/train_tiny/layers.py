"""The layers of the training graph: batched, un-absorbed, differentiable.

Weights are fp32; each product is taken in the dtype of its input. Letters in shapes are those of
`ml4core.api.model`, with `B` sequences of `T` tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ml4core.api import LayerSpec, MoESpec
from tools.train_tiny.attention import Kernel, attend
from tools.train_tiny.rotary import Places, require_learned_log, rotate, ssmax_factor

SSMAX_START = 0.144
"""Makes the factor of a query 1 at about a thousand visible keys."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """[B, Q, ...] of x [B, T, ...] at positions `rows` int64 [B, Q]."""
    return x[torch.arange(len(rows), device=rows.device).unsqueeze(-1), rows]


def matrix(*shape: int, scale: float = 1.0) -> nn.Parameter:
    """Normal values of deviation `scale` / sqrt(columns)."""
    return nn.Parameter(torch.randn(shape) * (scale * shape[-1] ** -0.5))


class Attention(nn.Module):
    """MLA over all visible keys, or over those of a mask."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        if spec.q_lora_rank is not None:
            raise ValueError(
                f"q_lora_rank {spec.q_lora_rank}: only a query without LoRA is trained"
            )
        require_learned_log(spec.ssmax, "ssmax")
        self.heads, self.nope, self.rope = spec.heads, spec.nope_dim, spec.rope_dim
        self.value, self.latent = spec.v_dim, spec.kv_lora_rank
        self.eps, self.scale = spec.norm_eps, spec.softmax_scale
        self.kernel: Kernel = "any"
        hidden = spec.hidden_size
        self.wq = matrix(spec.heads * spec.q_dim, hidden, scale=0.5)
        if spec.owns_kv:
            self.wkv_a = matrix(spec.kv_lora_rank + spec.rope_dim, hidden, scale=0.5)
            self.kv_a_norm = nn.Parameter(torch.ones(spec.kv_lora_rank))
        self.owns_kv = spec.owns_kv
        self.w_uk = matrix(spec.heads * spec.nope_dim, spec.kv_lora_rank, scale=0.5)
        self.w_uv = matrix(spec.heads * spec.v_dim, spec.kv_lora_rank, scale=0.5)
        self.wo = matrix(hidden, spec.heads * spec.v_dim, scale=0.1)
        self.ssmax_scale = nn.Parameter(torch.full((spec.heads,), SSMAX_START))
        self.ssmax_bias = nn.Parameter(torch.zeros(spec.heads)) if spec.ssmax.bias else None

    def query(self, h: Tensor, at: Places) -> Tensor:
        """[B, T, N, P + R], rotated and scaled."""
        q = linear(h, self.wq).unflatten(-1, (self.heads, self.nope + self.rope))
        if self.rope:
            end = rotate(q[..., self.nope :], at.cos, at.sin)
            q = torch.cat((q[..., : self.nope], end), dim=-1)
        return (q * ssmax_factor(at.log_n, self.ssmax_scale, self.ssmax_bias)).to(h.dtype)

    def latent_of(self, h: Tensor, at: Places) -> Tensor:
        """What is cached of each token: [B, T, L + R], normed and rotated."""
        both = linear(h, self.wkv_a)
        latent = rms_norm(both[..., : self.latent], self.kv_a_norm, self.eps)
        if not self.rope:
            return latent
        end = rotate(both[..., None, self.latent :], at.cos, at.sin).squeeze(-2)
        return torch.cat((latent, end), dim=-1)

    def keys(self, row: Tensor) -> Tensor:
        """[B, T, N, P + R] of cached rows."""
        k = linear(row[..., : self.latent], self.w_uk).unflatten(-1, (self.heads, self.nope))
        if not self.rope:
            return k
        end = row[..., None, self.latent :].expand(-1, -1, self.heads, -1)
        return torch.cat((k, end), dim=-1)

    def values(self, row: Tensor) -> Tensor:
        """[B, T, N, V] of cached rows."""
        return linear(row[..., : self.latent], self.w_uv).unflatten(-1, (self.heads, self.value))

    def forward(
        self, h: Tensor, shared: Tensor | None, at: Places, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The layer's share of the residual, and the rows it attended to.

        `shared` are the rows of another layer, for a consumer. `chosen` bool [B, T, T] says which
        keys a query sees; None: all up to its own.
        """
        if self.owns_kv:
            row = self.latent_of(h, at)
        else:
            assert shared is not None
            row = shared
        q, k, v = self.query(h, at), self.keys(row), self.values(row)
        return self.project(attend(q, k, v, self.scale, chosen, self.kernel)), row

    def project(self, out: Tensor) -> Tensor:
        """The share of the residual of attended values [B, T, N, V]."""
        return linear(out.flatten(-2), self.wo)


class Dense(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = matrix(width, hidden, scale=0.5)
        self.w3 = matrix(width, hidden, scale=0.5)
        self.w2 = matrix(hidden, width, scale=0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = linear(F.silu(linear(x, self.w1)) * linear(x, self.w3), self.w2)
        return y, torch.zeros((), device=x.device)


class MoE(nn.Module):
    """All experts as one wide SwiGLU whose inner values are weighted by the router.

    With half of eight narrow experts chosen, computing all of them is faster than sorting tokens.
    """

    def __init__(self, hidden: int, spec: MoESpec) -> None:
        super().__init__()
        if not spec.renormalize or spec.routed_scale != 1.0 or not spec.shared_width:
            raise ValueError(f"moe: {spec}; trained are renormalised weights and a shared expert")
        self.experts, self.topk, self.width = spec.experts, spec.topk, spec.expert_width
        self.gate = matrix(spec.experts, hidden, scale=0.5)
        self.w1 = matrix(spec.experts, spec.expert_width, hidden, scale=0.5)
        self.w3 = matrix(spec.experts, spec.expert_width, hidden, scale=0.5)
        self.w2 = matrix(spec.experts, hidden, spec.expert_width, scale=0.1)
        self.shared = Dense(hidden, spec.shared_width)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights fp32 [..., E], zero for experts not chosen; and the load-balancing loss."""
        odds = F.linear(x.float(), self.gate).softmax(-1)
        # How many experts stand before each: one kernel, where a sort is slow. Ties: lowest id.
        one, other = odds.unsqueeze(-1), odds.unsqueeze(-2)
        place = torch.arange(self.experts, device=x.device)
        before = (other > one) | ((other == one) & (place < place.unsqueeze(-1)))
        taken = (before.sum(-1) < self.topk).float()
        weights = odds * taken
        weights = weights / weights.sum(-1, keepdim=True)
        load = taken.flatten(0, -2).mean(0) / self.topk
        balance = self.experts * (load * odds.flatten(0, -2).mean(0)).sum()
        return weights, balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, balance = self.route(x)
        shared = self.shared
        gate = linear(x, torch.cat((self.w1.flatten(0, 1), shared.w1)))
        up = linear(x, torch.cat((self.w3.flatten(0, 1), shared.w3)))
        down = torch.cat((self.w2.transpose(0, 1).flatten(1), shared.w2), dim=1)
        routed = weights.to(x.dtype).unsqueeze(-1).expand(*weights.shape, self.width).flatten(-2)
        always = routed.new_ones(()).expand(*x.shape[:-1], shared.w1.shape[0])
        inner = F.silu(gate) * up * torch.cat((routed, always), dim=-1)
        return linear(inner, down), balance


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.drop = 0.0
        """Share of the values added to the residual that training leaves out."""
        self.attention_norm = nn.Parameter(torch.ones(spec.hidden_size))
        self.attention = Attention(spec)
        self.ffn_norm = nn.Parameter(torch.ones(spec.hidden_size))
        self.ffn: Dense | MoE
        if spec.moe is not None:
            self.ffn = MoE(spec.hidden_size, spec.moe)
        else:
            assert spec.dense_width is not None
            self.ffn = Dense(spec.hidden_size, spec.dense_width)

    def normed(self, x: Tensor) -> Tensor:
        """What the attention, and the indexer beside it, are given."""
        return rms_norm(x, self.attention_norm, self.eps)

    def forward(
        self, x: Tensor, shared: Tensor | None, at: Places, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The residual, the rows attended to, and the load-balancing loss."""
        out, row = self.attention(self.normed(x), shared, at, chosen)
        x = x + self._dropped(out)
        y, balance = self.feed_forward(x)
        return x + self._dropped(y), row, balance

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.drop) if self.drop and self.training else x

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Its share of the residual, and the load-balancing loss."""
        y, balance = self.ffn(rms_norm(x, self.ffn_norm, self.eps))
        return y, balance
