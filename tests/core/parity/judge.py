"""What Hugging Face computes, and how our numbers are held against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

LOGITS = 1e-4
"""Bound of |ours - theirs| over the largest |theirs|, of a prompt and of each of its rows."""
TIE = 1e-5
"""Index scores this close to the last selected one, over the row's largest, count as ties.

It is a few times the noise of fp32."""


@dataclass(frozen=True)
class IndexerCall:
    """One run of an indexer over a whole prompt of T tokens.

    Attributes:
        scores: [T, T] fp32 as they go into the top-k, -inf where a key is not visible.
        topk: [T, k] positions, those of keys that are not visible among them.
    """

    scores: Tensor
    topk: Tensor


@dataclass(frozen=True)
class Sparse:
    """What a model with indexers does on one prompt.

    Attributes:
        logits: [T, vocab].
        indexers: by layer, of the layers that own one.
        attended: by layer, the positions [T, k] that its attention was given.
    """

    logits: Tensor
    indexers: dict[int, IndexerCall]
    attended: dict[int, Tensor]


def logits(model: nn.Module, prompt: Sequence[int]) -> Tensor:
    """Logits [T, vocab] of one prompt, in one pass without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([list(prompt)]), use_cache=False).logits[0]


def cached_logits(model: nn.Module, prompt: Sequence[int], prefill: int) -> Tensor:
    """Logits [T, vocab] by its own cache: ``prefill`` tokens at once, the rest one by one."""
    ids = torch.tensor([list(prompt)])
    cuts = [0, *range(prefill, len(prompt) + 1)]
    rows: list[Tensor] = []
    cache = None
    with torch.inference_mode():
        for start, stop in pairwise(cuts):
            output = model(ids[:, start:stop], cache=cache, use_cache=True)
            cache = output.cache
            rows.append(output.logits[0])
    return torch.cat(rows)


def sparse_run(model: Any, prompt: Sequence[int]) -> Sparse:
    """Runs a model whose layers attend to selections, and takes down each with its scores."""
    seen: list[IndexerCall] = []
    layers: list[int] = []
    attended: dict[int, Tensor] = {}
    original = torch.Tensor.topk

    def topk(scores: Tensor, k: int, dim: int = -1) -> Any:
        found = original(scores, k, dim=dim)
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        kept = scores[0].masked_fill(~visible, float("-inf"))
        seen.append(IndexerCall(kept.clone(), found.indices[0].clone()))
        return found

    def indexer_hook(layer: int) -> Any:
        def hook(*_: Any) -> None:
            layers.append(layer)

        return hook

    def attention_hook(layer: int) -> Any:
        # The indices go into a mask inside; a layer that shares returns those that it was given.
        def hook(module: nn.Module, args: Any, output: tuple[Any, ...]) -> None:
            attended[layer] = output[2][0] if len(output) > 2 else seen[-1].topk

        return hook

    handles = []
    for number, layer in enumerate(model.model.layers):
        if layer.self_attn.indexer is not None:
            handles.append(layer.self_attn.indexer.register_forward_hook(indexer_hook(number)))
        handles.append(layer.self_attn.register_forward_hook(attention_hook(number)))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "topk", topk)
            found = logits(model, prompt)
    finally:
        for handle in handles:
            handle.remove()
    return Sparse(found, dict(zip(layers, seen, strict=True)), attended)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The larger of the relative difference as a whole and that of the worst row."""
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().amax(-1)
    size = theirs.abs().amax(-1)
    return max(float(error.max() / size.max()), float((error / size).max()))


def assert_equal_logits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Every row of every prompt is within ``LOGITS``, and none is too flat to say anything."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a.shape == b.shape, f"prompt {index}"
        assert a.isfinite().all(), f"prompt {index}"
        top = b.topk(2).values
        assert float(b.std(-1).min()) > 1.0, f"prompt {index}: the reference is nearly flat"
        assert float((top[:, 0] - top[:, 1]).median()) > 100 * LOGITS * float(b.abs().max())
        worst = difference(a, b)
        row = int((a - b).abs().amax(-1).argmax())
        assert worst <= LOGITS, (
            f"prompt {index} of {len(b)} tokens differs by {worst:.1e}, row {row}"
        )


def selected(positions: Tensor, keys: int) -> Tensor:
    """Positions [T, k], -1 for none, as a mask [T, keys]. Nothing may be selected twice."""
    mask = torch.zeros(len(positions), keys + 1, dtype=torch.int32)
    index = torch.where(positions < 0, keys, positions).long()
    mask.scatter_add_(1, index, torch.ones_like(index, dtype=torch.int32))
    assert int(mask[:, :keys].max()) <= 1, "a position was selected twice"
    return mask[:, :keys] > 0


def tie_margin(scores: Tensor) -> Tensor:
    """[T, 1]: how far from the last selected score a key may be to be interchangeable with it."""
    finite = scores.masked_fill(scores.isinf(), 0.0)
    return TIE * finite.abs().amax(-1, keepdim=True)


def boundary_gap(call: IndexerCall) -> float:
    """The smallest distance between the last selected and the first left out, in tie margins."""
    k = call.topk.shape[1]
    scores = call.scores[k:]  # rows that have something to leave out
    if not len(scores):
        return float("inf")
    ordered = scores.sort(-1, descending=True).values
    return float(((ordered[:, k - 1] - ordered[:, k]) / tie_margin(scores)[:, 0]).min())


def assert_equal_selection(positions: Tensor, call: IndexerCall) -> int:
    """Our selection [T, k] is that of ``call`` but for ties. Gives the number of other keys.

    A key above the last selected score by more than the margin must be there, one below it by
    more must not.
    """
    keys = call.scores.shape[1]
    ours = selected(positions, keys)
    visible = call.scores > float("-inf")
    k = call.topk.shape[1]
    count = visible.sum(-1).clamp_max(k)
    assert torch.equal(ours.sum(-1), count), "a row has too many or too few keys"
    assert not (ours & ~visible).any(), "a key that is not visible was selected"
    last = call.scores.sort(-1, descending=True).values.gather(1, count.unsqueeze(1) - 1)
    margin = tie_margin(call.scores)
    missed = (call.scores > last + margin) & ~ours
    excess = (call.scores < last - margin) & ours
    assert not missed.any(), f"rows {missed.any(-1).nonzero()[:8, 0].tolist()} miss a key"
    assert not excess.any(), f"rows {excess.any(-1).nonzero()[:8, 0].tolist()} have a wrong key"
    return int((ours & ~(selected(call.topk, keys) & visible)).sum())


def overlap(positions: Tensor, call: IndexerCall) -> Tensor:
    """[T - k]: the share of the reference's keys that ours has, in rows with more than k keys."""
    k = call.topk.shape[1]
    keys = call.scores.shape[1]
    both = selected(positions, keys)[k:] & selected(call.topk, keys)[k:]
    return both.sum(-1) / k
