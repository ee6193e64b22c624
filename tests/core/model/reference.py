"""The decoder once more, from params.json and the checkpoint's own tensors, in float64.

One request, all rows at once, keys and values expanded a head, one expert and one selected key
after the other: slow, and in no part the code under test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

FP8_BLOCK = 128


class Reference:
    """A checkpoint whose params.json states every choice that matters here."""

    def __init__(self, folder: Path, dense_layers: Collection[int] = ()) -> None:
        """``dense_layers`` attend to every key, whatever the schedule of selections says."""
        self.p: dict[str, Any] = json.loads((folder / "params.json").read_text())
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.tensors |= load_file(file)
        self.dense_layers = dense_layers
        p = self.p
        every = p.get("nope_every")
        self.nope = set(
            p.get("nope_layers") or (range(every - 1, p["n_layers"], every) if every else ())
        )
        self.sources = {int(layer): owner for layer, owner in p.get("kv_sharing", {}).items()}
        self.indexer: dict[str, Any] | None = p.get("indexer")
        self.topk = self.indexer["topk"] if self.indexer else 0
        self.scaling: dict[str, Any] = p.get("ssmax") or {"kind": "llama4", **p["llama_4_scaling"]}

    def logits(self, ids: list[int]) -> Tensor:
        """[T, vocab] of every position."""
        p = self.p
        self.positions = torch.arange(len(ids))
        self.latents: dict[int, tuple[Tensor, Tensor]] = {}
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        chosen = causal
        x = self.tensors["tok_embeddings.weight"].double()[ids]
        for layer in range(p["n_layers"]):
            name = f"layers.{layer}."
            h = self._rms(x, name + "attention_norm")
            q_input, q = self._query(layer, h)
            if self.indexer and self.indexer["topk_pattern"][layer] == "F":
                chosen = self._select(layer, h, q_input, causal)
            mask = causal if layer in self.dense_layers else chosen
            x = x + self._attention(layer, h, q, mask) @ self._matrix(name + "attention.wo").T
            x = x + self._feed_forward(layer, self._rms(x, name + "ffn_norm"))
        tied = p["tied_embeddings"]
        table = self.tensors["tok_embeddings.weight"].double() if tied else self._matrix("output")
        return self._rms(x, "norm") @ table.T

    def stored(self, layer: int, rows: Tensor) -> Tensor:
        """What the cache of a layer gives back of rows [T, L + R]; here all of it."""
        return rows

    def _matrix(self, stem: str) -> Tensor:
        data = self.tensors[stem + ".weight"]
        values = data.double()
        if data.dtype == torch.float8_e4m3fn:
            scale = self.tensors[stem + ".weight_scale"].double()
            for i in range(scale.shape[0]):
                for j in range(scale.shape[1]):
                    rows = slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK)
                    values[rows, j * FP8_BLOCK : (j + 1) * FP8_BLOCK] *= scale[i, j]
        return values

    def _vector(self, name: str) -> Tensor | None:
        found = self.tensors.get(name)
        return None if found is None else found.double()

    def _rms(self, x: Tensor, stem: str) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True) + self.p["norm_eps"]
        return x / mean.sqrt() * self.tensors[stem + ".weight"].double()

    def _layer_norm(self, x: Tensor, stem: str, eps: float) -> Tensor:
        weight, bias = (self.tensors[f"{stem}.{part}"].double() for part in ("weight", "bias"))
        centred = x - x.mean(-1, keepdim=True)
        return centred / ((centred**2).mean(-1, keepdim=True) + eps).sqrt() * weight + bias

    def _dims(self, layer: int) -> tuple[int, int]:
        """q.k dims of a head without rope, and with."""
        p = self.p
        if layer in self.nope:
            return p.get("nope_qk_head_dim", p["qk_nope_head_dim"]), 0
        return p["qk_nope_head_dim"], p["qk_rope_head_dim"]

    def _query(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """What the index query is made of, and the query [T, N, P + R]."""
        name, p = f"layers.{layer}.attention.", self.p
        plain, turned = self._dims(layer)
        q_input = h
        if p["q_lora_rank"] is None:
            q = h @ self._matrix(name + "wq").T
        else:
            q_input = self._rms(h @ self._matrix(name + "wq_a").T, name + "q_a_norm")
            q = q_input @ self._matrix(name + "wq_b").T
        q = q.view(len(h), p["n_heads"], plain + turned)
        if turned:
            end = self._rope(q[..., plain:], p["rope_interleave"])
            q = torch.cat([q[..., :plain], end], dim=-1)
        return q_input, q * self._factor(self.scaling, name + "ssmax_")

    def _attention(self, layer: int, h: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        """[T, N V]."""
        name, p = f"layers.{layer}.attention.", self.p
        rank, heads = p["kv_lora_rank"], p["n_heads"]
        plain, turned = self._dims(layer)
        if layer not in self.sources:
            both = h @ self._matrix(name + "wkv_a_with_mqa").T
            end = both[:, None, rank : rank + turned]
            end = self._rope(end, p["rope_interleave"]) if turned else end
            latent = self._rms(both[:, :rank], name + "kv_a_norm")
            row = self.stored(layer, torch.cat([latent, end.squeeze(1)], dim=-1))
            self.latents[layer] = row[:, :rank], row[:, None, rank:]
        latent, end = self.latents[self.sources.get(layer, layer)]
        up = self._matrix(name + "wkv_b").view(heads, plain + p["v_head_dim"], rank)
        k = torch.einsum("sl,nkl->snk", latent, up[:, :plain])
        k = torch.cat([k, end.expand(-1, heads, -1)], dim=-1)
        v = torch.einsum("sl,nvl->snv", latent, up[:, plain:])
        scale = (plain + turned) ** -0.5
        yarn = p["yarn"]
        if turned and yarn["apply_scale"]:
            scale *= (0.1 * math.log(yarn["factor"]) + 1.0) ** 2
        scores = torch.einsum("tnk,snk->nts", q, k) * scale
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return torch.einsum("nts,snv->tnv", weights, v).flatten(1)

    def _select(self, layer: int, h: Tensor, q_input: Tensor, causal: Tensor) -> Tensor:
        """Which keys each row chooses: bool [T, T]."""
        name, indexer = f"layers.{layer}.attention.indexer.", self.indexer
        assert indexer is not None
        heads, dim = indexer["n_heads"], indexer["head_dim"]
        source = h if indexer["query_input"] == "hidden" else q_input
        q = (source @ self._matrix(name + "wq").T).view(len(h), heads, dim)
        if indexer["q_norm"]:
            q = self._layer_norm(q, name + "q_norm", indexer["norm_eps"])
        k = h @ self._matrix(name + "wk").T
        k = self._layer_norm(k, name + "k_norm", indexer["norm_eps"]).unsqueeze(1)
        turned = self._dims(layer)[1]
        if turned:
            q, k = (
                torch.cat(
                    [self._rope(x[..., :turned], indexer["rope_interleave"]), x[..., turned:]], -1
                )
                for x in (q, k)
            )
        q = q * self._factor(indexer["ssmax"], name + "ssmax_")
        weights = h @ self._matrix(name + "weights_proj").T
        dots = torch.einsum("thd,sd->ths", q, k.squeeze(1)).relu()
        scores = torch.einsum("th,ths->ts", weights, dots) * dim**-0.5 * heads**-0.5
        chosen = torch.zeros_like(causal)
        for row in range(len(h)):
            order = sorted(range(row + 1), key=lambda s, row=row: (-float(scores[row, s]), s))
            chosen[row, order[: self.topk]] = True
        return chosen

    def _frequencies(self) -> Tensor:
        p = self.p
        dim, theta, yarn = p["qk_rope_head_dim"], p["rope_theta"], p["yarn"]

        def pair(rotations: float) -> float:
            turns = yarn["original_max_position_embeddings"] / (rotations * 2 * math.pi)
            return dim * math.log(turns) / (2 * math.log(theta))

        low = max(math.floor(pair(yarn["beta"])), 0)
        high = min(math.ceil(pair(yarn["alpha"])), dim - 1)
        found = []
        for j in range(dim // 2):
            keep = 1 - min(max((j - low) / (high - low or 0.001), 0.0), 1.0)
            frequency = theta ** (-2 * j / dim)
            found.append(frequency * keep + frequency / yarn["factor"] * (1 - keep))
        learned = self._vector("rope_freqs")
        frequencies = torch.tensor(found, dtype=torch.float64)
        return frequencies if learned is None else frequencies * learned

    def _rope(self, x: Tensor, interleaved: bool) -> Tensor:
        """x [T, n, R] turned by its positions."""
        angle = (self.positions.double()[:, None] * self._frequencies()).unsqueeze(1)
        pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
        a, b = pairs.unbind(-1 if interleaved else -2)
        turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
        return torch.stack(turned, -1 if interleaved else -2).flatten(-2)

    def _factor(self, block: Mapping[str, Any], stem: str) -> Tensor:
        """[T, 1 or heads, 1]."""
        kind, original = block["kind"], block.get("original_max_position_embeddings")
        beta = block.get("beta")
        n = (self.positions + 1).double()
        if block.get("n") == "topk":
            n = n.clamp(max=self.topk)
        if kind == "none":
            value = torch.ones_like(n)
        elif kind == "llama4":
            value = 1 + beta * torch.log1p(((n - 1) / original).floor())
        elif kind == "log":
            value = n.log()
        elif kind == "pow":
            value = (1 + n / original) ** beta
        else:
            value = 1 + beta * (n / original).clamp(min=1).log()
        scale, bias = self._vector(stem + "scale"), self._vector(stem + "bias")
        constant = block.get("scale") or 1.0
        factor = value[:, None] * (constant if scale is None else scale)
        return (factor if bias is None else factor + bias).unsqueeze(-1)

    def _feed_forward(self, layer: int, h: Tensor) -> Tensor:
        name, moe = f"layers.{layer}.", self.p["moe"]
        if layer < moe["first_k_dense_replace"] or layer % moe["route_every_n"]:
            return self._swiglu(name + "feed_forward", h)
        odds = (h @ self._matrix(name + "gate").T).softmax(-1)
        out = torch.zeros_like(h)
        for row in range(len(h)):
            order = sorted(
                range(moe["num_experts"]), key=lambda e, row=row: (-float(odds[row, e]), e)
            )
            ids = order[: moe["num_experts_per_tok"]]
            weights = odds[row, ids]
            if moe["renorm_strategy"] == "WEIGHTS":
                weights = weights / weights.sum()
            for expert, weight in zip(ids, weights * moe["routed_scale"], strict=True):
                out[row] += weight * self._swiglu(f"{name}experts.{expert}", h[row])
        if moe["num_shared_experts"]:
            out += self._swiglu(name + "shared_experts", h)
        return out

    def _swiglu(self, stem: str, x: Tensor) -> Tensor:
        gate, up = (x @ self._matrix(f"{stem}.{part}").T for part in ("w1", "w3"))
        return (silu(gate) * up) @ self._matrix(f"{stem}.w2").T
