"""The vision encoder and its projector in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import VisionSpec, VisionWeights
from ml4core_conformance.oracle.stages import EXACT, Rounding, rms_norm, rope, silu_mul, values


class VisionOracle:
    """An encoder of dense weights."""

    def __init__(
        self, spec: VisionSpec, weights: VisionWeights, rounding: Rounding = EXACT
    ) -> None:
        self.spec = spec
        self.rounded = rounding
        self.top = {name: values(value) for name, value in weights.top.items()}
        self.layers = [
            {name: values(value) for name, value in layer.items()} for layer in weights.layers
        ]

    def run(self, patches: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [T / (s s), H] of one image's patches [T, C p p] at positions [T, 2]."""
        r, spec, top = self.rounded, self.spec, self.top
        x = r(r(values(patches)) @ top["patch_conv"].T)
        x = r(rms_norm(x, top["ln_pre"], spec.norm_eps))
        for w in self.layers:
            hidden = r(rms_norm(x, w["attention_norm"], spec.norm_eps))
            x = r(x + r(self._attention(w["wqkv"], hidden, positions) @ w["wo"].T))
            hidden = r(rms_norm(x, w["ffn_norm"], spec.norm_eps))
            x = r(x + r(r(silu_mul(r(hidden @ w["w13"].T))) @ w["w2"].T))
        return self._projected(x)

    def _attention(self, wqkv: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        spec, r = self.spec, self.rounded
        qkv = r(hidden @ wqkv.T).unflatten(-1, (3, spec.heads, spec.head_dim))
        q, k = (self._turned(part, positions) for part in (qkv[:, 0], qkv[:, 1]))
        scores = torch.einsum("tna,sna->nts", q, k) * spec.head_dim**-0.5
        return r(torch.einsum("nts,sna->tna", scores.softmax(-1), qkv[:, 2])).flatten(1)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """The first pairs of each head by the patch's row, the others by its column."""
        pairs = self.spec.row_pairs
        frequencies = self.top["inv_freq"]
        parts = (
            (x[..., : 2 * pairs], positions[:, 0], frequencies[:pairs]),
            (x[..., 2 * pairs :], positions[:, 1], frequencies[pairs:]),
        )
        return self.rounded(torch.cat([rope(*part, True) for part in parts], -1))

    def _projected(self, x: Tensor) -> Tensor:
        r, spec, top = self.rounded, self.spec, self.top
        if spec.pre_projector_norm:
            x = r(rms_norm(x, top["pre_projector_norm"], spec.norm_eps))
        if spec.patch_merger:
            # Columns of the merging layer go by channel, then by patch of the cell.
            cells = x.unflatten(0, (-1, spec.cell_patches)).transpose(1, 2).flatten(1)
            x = r(cells @ top["merging_layer"].T)
        x = x @ top["adapter_in"].T
        if spec.adapter_bias:
            x = x + top["adapter_in_bias"]
        x = r(x * 0.5 * (1 + torch.erf(x * 2**-0.5)))
        x = x @ top["adapter_out"].T
        if spec.adapter_bias:
            x = x + top["adapter_out_bias"]
        return r(x)
