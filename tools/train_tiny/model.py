"""The decoder as a training graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ml4core.api import ModelSpec
from tools.train_tiny.indexer import Indexer
from tools.train_tiny.layers import Block, linear, rms_norm
from tools.train_tiny.rotary import Places, base_frequencies, places

EMBEDDING_STD = 0.3


class Output(NamedTuple):
    hidden: Tensor
    """[B, T, H] after the final norm."""
    balance: Tensor
    """Load-balancing loss, mean over MoE layers."""
    taps: tuple[Tensor, ...]
    """Residuals [B, T, H] after the layers asked for."""


class Step(NamedTuple):
    """What a layer is about to do, for whoever walks the layers."""

    layer: int
    normed: Tensor
    rows: Tensor
    """The rows that it attends to."""


class TinyModel(nn.Module):
    """`spec` with its indexers."""

    frequencies: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        rope = next(layer.rope for layer in spec.layers if layer.rope is not None)
        if rope.lerope != "multiplier" or rope.lerope_scope != "global" or not rope.interleaved:
            raise ValueError(f"rope {rope}: trained are interleaved pairs with global multipliers")
        self.rope = rope
        self.embedding = nn.Parameter(
            torch.randn(spec.vocab_size, spec.hidden_size) * EMBEDDING_STD
        )
        self.output = nn.Parameter(torch.randn(spec.vocab_size, spec.hidden_size) * 0.01)
        self.norm = nn.Parameter(torch.ones(spec.hidden_size))
        self.rope_freqs = nn.Parameter(torch.ones(rope.dim // 2))
        self.blocks = nn.ModuleList(Block(layer) for layer in spec.layers)
        self.indexers = nn.ModuleDict(
            {str(layer): Indexer(spec.layers[layer]) for layer in spec.index_owners}
        )
        self.register_buffer("frequencies", base_frequencies(rope, False), persistent=False)
        self.stretched = False

    def stretch(self, on: bool) -> None:
        """Turn YaRN on or off."""
        device = self.frequencies.device
        self.frequencies = base_frequencies(self.rope, on).to(device)
        self.stretched = on

    def block(self, layer: int) -> Block:
        return cast(Block, self.blocks[layer])

    def indexer(self, layer: int) -> Indexer:
        """That of a layer that owns one."""
        return cast(Indexer, self.indexers[str(layer)])

    def core_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All but the indexers'."""
        return (pair for pair in self.named_parameters() if not pair[0].startswith("indexers."))

    def places(self, length: int) -> Places:
        positions = torch.arange(length, device=self.embedding.device)
        return places(positions, self.frequencies * self.rope_freqs)

    def forward(
        self,
        ids: Tensor,
        dtype: torch.dtype = torch.float32,
        *,
        sparse: bool = False,
        taps: Collection[int] = (),
        steps: list[Step] | None = None,
    ) -> Output:
        """ids [B, T]. `sparse`: each layer sees the keys that its indexer chose.

        `steps` is filled with what the layers were given, for a loss over attention.
        """
        at = self.places(ids.shape[1])
        x = F.embedding(ids, self.embedding).to(dtype)
        rows: dict[int, Tensor] = {}
        chosen: dict[int, Tensor] = {}
        found: dict[int, Tensor] = {}
        balance = torch.zeros((), device=x.device)
        experts = max(1, sum(layer.moe is not None for layer in self.spec.layers))
        for layer in self.spec.layers:
            block = self.block(layer.index)
            if sparse and layer.owns_index:
                with torch.no_grad():
                    chosen[layer.index] = self.indexer(layer.index).choose(block.normed(x), at)
            mask = chosen[layer.topk_source] if sparse and layer.topk_source is not None else None
            before = x
            shared = None if layer.owns_kv else rows[layer.kv_source]
            x, row, loss = block(x, shared, at, mask)
            rows[layer.index] = row
            balance = balance + loss / experts
            if steps is not None:
                steps.append(Step(layer.index, block.normed(before), row))
            if layer.index in taps:
                found[layer.index] = x
        return Output(self.normed(x), balance, tuple(found[layer] for layer in taps))

    def normed(self, x: Tensor) -> Tensor:
        """What the output is given of the last residual."""
        return rms_norm(x, self.norm, self.spec.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.output).float()


def token_loss(
    hidden: Tensor, output: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum over tokens of weight * negative log likelihood, and the sum of weights.

    hidden [B, T, H]; targets and weights [B, T].
    """
    logits = linear(hidden.flatten(0, 1), output).float()
    each = F.cross_entropy(logits, targets.flatten(), reduction="none")
    weights = weights.flatten().float()
    return (each * weights).sum(), weights.sum()


def sharers(spec: ModelSpec, owner: int) -> Sequence[int]:
    """The layers that use the selection of `owner`."""
    return [layer.index for layer in spec.layers if layer.topk_source == owner]
