"""The block drafter in fp64, one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ml4core.api import DraftSpec, DraftWeights
from ml4core_conformance.oracle.stages import EXACT, LayerOracle, Rounding, rms_norm, values


class DraftOracle:
    """A drafter of dense weights."""

    def __init__(self, spec: DraftSpec, weights: DraftWeights, rounding: Rounding = EXACT) -> None:
        self.spec = spec
        self.rounded = rounding
        self.top = {name: values(value) for name, value in weights.top.items()}
        self.layers = [
            LayerOracle(layer, own, rounding)
            for layer, own in zip(spec.layers, weights.layers, strict=True)
        ]

    def context_rows(self, taps: Sequence[Tensor], positions: Tensor) -> list[Tensor]:
        """By layer, the rows [C, L + R] that accepted tokens at positions [C] leave; ``taps`` are
        [C, H] each.
        """
        r, top = self.rounded, self.top
        joined = torch.cat([values(tap) for tap in taps], -1)
        states = r(rms_norm(r(joined @ top["fc"].T), top["context_norm"], self.spec.norm_eps))
        return [layer.row(states, positions) for layer in self.layers]

    def sees(self, start: int) -> Tensor:
        """Which of positions 0 .. start + depth - 1 each row of the block from ``start`` on sees:
        bool [depth, start + depth].
        """
        spec = self.spec
        row = start + torch.arange(spec.depth).unsqueeze(-1)
        key = torch.arange(start + spec.depth)
        if spec.window is None:
            return torch.ones(spec.depth, start + spec.depth, dtype=torch.bool)
        if spec.window_mode == "row":
            return (row - key).abs() < spec.window
        return ((key >= start) | (key >= start - spec.window)).expand(spec.depth, -1)

    def block(
        self, anchor: int, start: int, context: Sequence[Tensor], stored: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The residual and its norm [depth, H] after the last layer, and by layer the block's rows.

        Args:
            context: by layer, the rows [start, width] of the positions before the block.
            stored: what a cache gives back of rows.
        """
        r, top, spec = self.rounded, self.top, self.spec
        first = top["embedding"][anchor].unsqueeze(0)
        masks = top["mask_embeddings"]
        own = spec.anchor_vector != "none"
        if spec.anchor_vector == "add":
            first = r(first + masks[:1])
        elif spec.anchor_vector == "replace":
            first = masks[:1]
        residual = r(torch.cat((first, masks[own : own + spec.depth - 1])))
        hidden: Tensor | None = None
        norms = [layer.w["attention_norm"] for layer in self.layers[1:]] + [top["norm"]]
        positions = start + torch.arange(spec.depth)
        mask, written = self.sees(start), []
        for layer, before, norm in zip(self.layers, context, norms, strict=True):
            made = layer.inputs(residual, hidden, positions)
            assert made.row is not None
            written.append(made.row)
            rows = torch.cat((before, stored(made.row)))
            out, _ = layer.attention(made.q, rows, mask)
            residual, hidden = layer.output(out, residual)
            residual, hidden, _ = layer.ffn(residual, hidden, norm)
        assert hidden is not None
        return residual, hidden, written

    def logits(self, anchor: int, residual: Tensor, hidden: Tensor, ids: Sequence[int]) -> Tensor:
        """Logits [depth, vocab] of the sequential head that draws ``ids`` after the anchor."""
        r, top, spec = self.rounded, self.top, self.spec
        states = hidden if spec.normed_head_input else residual
        state = torch.zeros(spec.markov_rank, dtype=torch.float64)
        found, previous = [], anchor
        for i, token in enumerate(ids):
            joint = torch.cat((state, top["markov_w1"][previous], states[i]))
            gate, candidate, output = r.wide(
                top["markov_joint"] @ joint + top["markov_joint_bias"]
            ).chunk(3)
            gate = torch.sigmoid(gate)
            state = r.wide(gate * state + (1 - gate) * torch.tanh(candidate))
            share = top["markov_w2"] @ torch.tanh(output)
            found.append(r.wide(top["output"] @ hidden[i] + share))
            previous = token
        return torch.stack(found)
