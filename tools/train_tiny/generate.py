"""Continuations of prompts, one token of all sequences at a time, with cached keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train_tiny.model import TinyModel
from tools.train_tiny.rotary import Places


@torch.no_grad()
def continued(
    model: TinyModel,
    ids: Tensor,
    prompts: Tensor,
    dtype: torch.dtype,
    temperatures: Tensor | None = None,
    random: torch.Generator | None = None,
) -> Tensor:
    """`ids` [B, T] with all from `prompts` [B] on replaced by the model's own words.

    Full attention. `temperatures` fp32 [B]; zero, and None: the most likely token.
    """
    count, length = ids.shape
    ids = ids.clone()
    begin = int(prompts.min().item())
    at = model.places(length)
    caches = _Caches(model, count, length, dtype)
    hidden = caches.run(ids[:, :begin], 0, at)[:, -1]
    for place in range(begin, length):
        logits = model.logits(hidden)
        token = logits.argmax(-1)
        if temperatures is not None:
            # Gumbel noise: the largest of the sums is a draw from the softmax.
            noise = torch.empty_like(logits).exponential_(generator=random).log().neg()
            token = torch.where(
                temperatures > 0, (logits + noise * temperatures.unsqueeze(-1)).argmax(-1), token
            )
        ids[:, place] = torch.where(place >= prompts, token, ids[:, place])
        if place + 1 < length:
            hidden = caches.run(ids[:, place : place + 1], place, at)[:, -1]
    return ids


class _Caches:
    """Keys and values of every layer."""

    def __init__(self, model: TinyModel, count: int, length: int, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        device = model.embedding.device

        def empty(heads: int, width: int) -> Tensor:
            return torch.zeros(count, heads, length, width, dtype=dtype, device=device)

        self.keys = [empty(layer.heads, layer.q_dim) for layer in model.spec.layers]
        self.values = [empty(layer.heads, layer.v_dim) for layer in model.spec.layers]

    def run(self, ids: Tensor, begin: int, at: Places) -> Tensor:
        """The state [B, t, H] of `ids` [B, t], which stand at `begin`."""
        model = self.model
        end = begin + ids.shape[1]
        here = Places(at.cos[begin:end], at.sin[begin:end], at.log_n[begin:end])
        x = F.embedding(ids, model.embedding).to(self.dtype)
        rows: dict[int, Tensor] = {}
        for layer in model.spec.layers:
            block = model.block(layer.index)
            attention = block.attention
            h = block.normed(x)
            row = attention.latent_of(h, here) if layer.owns_kv else rows[layer.kv_source]
            rows[layer.index] = row
            keys, values = self.keys[layer.index], self.values[layer.index]
            keys[:, :, begin:end] = attention.keys(row).transpose(1, 2)
            values[:, :, begin:end] = attention.values(row).transpose(1, 2)
            q = attention.query(h, here).transpose(1, 2)
            out = F.scaled_dot_product_attention(
                q,
                keys[:, :, :end],
                values[:, :, :end],
                is_causal=begin == 0,
                scale=attention.scale,
            )
            x = x + attention.project(out.transpose(1, 2))
            x = x + block.feed_forward(x)[0]
        return model.normed(x)
