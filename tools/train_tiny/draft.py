"""The block drafter as a training graph: many anchors of a sequence at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ml4core.api import DraftSpec, LayerSpec
from tools.train_tiny.layers import Dense, linear, matrix, rms_norm
from tools.train_tiny.rotary import base_frequencies, rotate


class DraftLayer(nn.Module):
    """Dense MLA over the context and the whole block, and a feed-forward."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        if spec.ssmax.kind != "none" or spec.q_lora_rank is not None or spec.dense_width is None:
            raise ValueError(f"draft layer {spec}: trained is plain MLA with a dense feed-forward")
        self.heads, self.nope, self.rope = spec.heads, spec.nope_dim, spec.rope_dim
        self.value, self.latent = spec.v_dim, spec.kv_lora_rank
        self.eps, self.scale = spec.norm_eps, spec.softmax_scale
        hidden = spec.hidden_size
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.wq = matrix(spec.heads * spec.q_dim, hidden, scale=0.5)
        self.wkv_a = matrix(spec.kv_lora_rank + spec.rope_dim, hidden, scale=0.5)
        self.kv_a_norm = nn.Parameter(torch.ones(spec.kv_lora_rank))
        self.w_uk = matrix(spec.heads * spec.nope_dim, spec.kv_lora_rank, scale=0.5)
        self.w_uv = matrix(spec.heads * spec.v_dim, spec.kv_lora_rank, scale=0.5)
        self.wo = matrix(hidden, spec.heads * spec.v_dim, scale=0.1)
        self.ffn_norm = nn.Parameter(torch.ones(hidden))
        self.ffn = Dense(hidden, spec.dense_width)

    def keys_values(self, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """k [B, S, N, P + R] and v [B, S, N, V] of states [B, S, H] at positions of cos, sin."""
        both = linear(states, self.wkv_a)
        latent = rms_norm(both[..., : self.latent], self.kv_a_norm, self.eps)
        end = rotate(both[..., None, self.latent :], cos, sin).expand(-1, -1, self.heads, -1)
        k = linear(latent, self.w_uk).unflatten(-1, (self.heads, self.nope))
        v = linear(latent, self.w_uv).unflatten(-1, (self.heads, self.value))
        return torch.cat((k, end), dim=-1), v

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        block_at: tuple[Tensor, Tensor],
        context_at: tuple[Tensor, Tensor],
        hidden_keys: Tensor,
    ) -> Tensor:
        """x [B, A, d, H], the blocks of A anchors; context [B, T, H].

        `hidden_keys` bool [B, A, d, T]: context that a row does not see.
        """
        anchors, depth = x.shape[1:3]
        h = rms_norm(x, self.attention_norm, self.eps).flatten(1, 2)
        q = linear(h, self.wq).unflatten(-1, (self.heads, self.nope + self.rope))
        q = torch.cat((q[..., : self.nope], rotate(q[..., self.nope :], *block_at)), dim=-1)
        k, v = self.keys_values(context, *context_at)
        own_k, own_v = self.keys_values(h, *block_at)
        far = torch.einsum("bqnd,btnd->bnqt", q, k).float() * self.scale
        far = far.masked_fill(hidden_keys.flatten(1, 2).unsqueeze(1), float("-inf"))
        q, own_k, own_v = (y.unflatten(1, (anchors, depth)) for y in (q, own_k, own_v))
        near = torch.einsum("baind,bajnd->bnaij", q, own_k).float() * self.scale
        weights = torch.cat((far, near.flatten(2, 3)), dim=-1).softmax(-1).to(x.dtype)
        far, near = weights.split([k.shape[1], depth], dim=-1)
        out = torch.einsum("bnqt,btnv->bqnv", far, v).unflatten(1, (anchors, depth))
        near = near.unflatten(2, (anchors, depth))
        out = out + torch.einsum("bnaij,bajnv->bainv", near, own_v)
        x = x + linear(out.flatten(-2), self.wo)
        return x + self.ffn(rms_norm(x, self.ffn_norm, self.eps))[0]


class Blocks(NamedTuple):
    """States of drafted rows."""

    hidden: Tensor
    """[B, A, d, H] after the drafter's norm."""
    head_input: Tensor
    """[B, A, d, H]: what the sequential head is given."""


class Drafter(nn.Module):
    """`spec`; the embedding and the output are the target's, given at each call."""

    frequencies: Tensor

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        rope = spec.layers[0].rope
        if rope is None or rope.lerope != "none" or spec.anchor_vector != "none":
            raise ValueError(f"drafter {spec}: trained are rope without learned frequencies, and "
                             "a learned vector for each row but the anchor's")  # fmt: skip
        self.spec = spec
        hidden, vocab, rank = spec.hidden_size, spec.vocab_size, spec.markov_rank
        self.fc = matrix(hidden, len(spec.taps) * hidden)
        self.context_norm = nn.Parameter(torch.ones(hidden))
        self.mask_embeddings = nn.Parameter(torch.randn(spec.mask_rows, hidden) * 0.3)
        self.layers = nn.ModuleList(DraftLayer(layer) for layer in spec.layers)
        self.norm = nn.Parameter(torch.ones(hidden))
        self.markov_w1 = nn.Parameter(torch.randn(vocab, rank) * 0.3)
        self.markov_joint = matrix(3 * rank, 2 * rank + hidden, scale=0.5)
        self.markov_joint_bias = nn.Parameter(torch.zeros(3 * rank))
        self.markov_w2 = nn.Parameter(torch.randn(vocab, rank) * 0.01)
        self.register_buffer("frequencies", base_frequencies(rope, True), persistent=False)

    def blocks(
        self, embedding: Tensor, taps: Sequence[Tensor], ids: Tensor, anchors: Tensor
    ) -> Blocks:
        """Blocks at `anchors` int64 [B, A], positions of tokens of `ids` [B, T].

        `taps` [B, T, H] each: a block sees those of positions before its anchor, within the window.
        """
        spec, dtype = self.spec, taps[0].dtype
        context = rms_norm(linear(torch.cat(tuple(taps), -1), self.fc), self.context_norm,
                           spec.norm_eps)  # fmt: skip
        positions = anchors.unsqueeze(-1) + torch.arange(spec.depth, device=ids.device)
        keys = torch.arange(ids.shape[1], device=ids.device)
        hidden_keys = keys >= anchors[..., None, None]
        hidden_keys = hidden_keys.expand(-1, -1, spec.depth, -1)
        if spec.window is not None:
            start = positions if spec.window_mode == "row" else anchors.unsqueeze(-1) - 1
            reach = start - spec.window
            hidden_keys = hidden_keys | (keys <= reach.unsqueeze(-1))
        first = F.embedding(ids.gather(1, anchors), embedding).unsqueeze(2)
        masks = self.mask_embeddings.expand(*anchors.shape, -1, -1)
        x = torch.cat((first, masks), dim=2).to(dtype)
        block_at = self._turn(positions.flatten(1))
        context_at = self._turn(keys)
        for layer in self.layers:
            x = layer(x, context, block_at, context_at, hidden_keys)
        hidden = rms_norm(x, self.norm, spec.norm_eps)
        return Blocks(hidden, hidden if spec.normed_head_input else x)

    def step(self, previous: Tensor, states: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The head's share [..., vocab] of the logits after the tokens `previous` [...]."""
        token = F.embedding(previous, self.markov_w1)
        joint = torch.cat((state, token, states.float()), dim=-1)
        joint = (linear(joint.to(states.dtype), self.markov_joint)).float() + self.markov_joint_bias
        gate, candidate, out = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * candidate.tanh()
        return linear(out.tanh().to(states.dtype), self.markov_w2).float(), state

    def logits(self, blocks: Blocks, output: Tensor, previous: Tensor | None, anchors: Tensor
               ) -> Tensor:  # fmt: skip
        """fp32 [B, A, d, vocab]. `anchors` [B, A]: tokens of the anchors.

        `previous` [B, A, d]: the token before each row; None: the most likely of the row before.
        """
        base = linear(blocks.hidden, output).float()
        state = base.new_zeros(*anchors.shape, self.spec.markov_rank)
        token, found = anchors, []
        for i in range(self.spec.depth):
            if previous is not None:
                token = previous[..., i]
            share, state = self.step(token, blocks.head_input[:, :, i], state)
            found.append(base[:, :, i] + share)
            token = found[-1].argmax(-1)
        return torch.stack(found, dim=2)

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.float().unsqueeze(-1) * self.frequencies
        return angle.cos(), angle.sin()


CE, KL, TV = 0.1, 0.5, 0.4
"""Shares of the loss: the text's own token, the target's distribution, and total variation, which
is what a drafted token is accepted by."""
ROW = 0.7
"""Weight of a row by the weight of the one before, which it is of no use without."""


def draft_loss(
    logits: Tensor, target: Tensor, tokens: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted sum over rows, and the sum of the weights.

    logits and the target's logits [B, A, d, vocab], tokens and weights [B, A, d].
    """
    logs = logits.log_softmax(-1)
    wanted = target.log_softmax(-1)
    odds = wanted.exp()
    entropy = F.nll_loss(logs.flatten(0, -2), tokens.flatten(), reduction="none").view_as(tokens)
    divergence = (odds * (wanted - logs)).sum(-1)
    variation = 0.5 * (odds - logs.exp()).abs().sum(-1)
    each = CE * entropy + KL * divergence + TV * variation
    weights = weights * ROW ** torch.arange(weights.shape[-1], device=weights.device)
    return (each * weights).sum(), weights.sum()
