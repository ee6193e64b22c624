"""Attention, joins and selection that are wrong in one way each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import After, Before, Changed, Op, Ops

_CHUNK = 8
"""Keys that are summed in fp32 before they are added to a total of bfloat16."""


def mutants() -> list[Mutant]:
    changes: Sequence[tuple[str, str, Ops, tuple[str, ...]]] = (
        (
            "last-head-zeroed",
            "The last of the heads is zero.",
            Ops(sparse_mla=After(last_head_zeroed)),
            ("ops.structure[sparse_mla/*]",),
        ),
        (
            "attention-gain",
            "Attention is 1.2 per cent too large.",
            Ops(sparse_mla=After(gain)),
            ("ops.bias[sparse_mla/*]",),
        ),
        (
            "attention-few-bits",
            "Values of keys are added up in bfloat16.",
            Ops(sparse_mla=few_bits),
            ("ops.elements[sparse_mla/*]",),
        ),
        (
            "page-off-by-one",
            "The last key of a page is read from the page before.",
            Ops(sparse_mla=Before(page_before)),
            ("ops.elements[sparse_mla/*]", "layout.cross_read[kv/*]"),
        ),
        (
            "length-ignored",
            "Slots behind a row's length are attended to.",
            Ops(sparse_mla=Before(length_ignored)),
            ("ops.elements[sparse_mla/*]",),
        ),
        (
            "window-one-more",
            "A window has one key too many.",
            Ops(window_mla=Before(wider_window)),
            ("ops.elements[window_mla/*]",),
        ),
        (
            "lse-base-two",
            "The log of the sum of exponentials is in base 2.",
            Ops(sparse_mla=After(base_two), window_mla=After(base_two)),
            ("ops.lse[sparse_mla/*]", "ops.lse[window_mla/*]", "ops.merge[sparse_mla/*]"),
        ),
        (
            "lse-of-nothing",
            "A row without keys has lse 0.",
            Ops(sparse_mla=After(zero_for_empty)),
            ("ops.lse[sparse_mla/*]", "ops.merge[sparse_mla/*]"),
        ),
        (
            "empty-part-weighed",
            "A part without keys is multiplied by 0, which keeps its NaN.",
            Ops(merge_lse=empty_part_weighed),
            ("ops.anomalies[merge_lse/*]", "ops.merge[merge_lse/*]"),
        ),
        (
            "negative-weights-lost",
            "Heads of the indexer whose weight is negative don't count.",
            Ops(indexer_logits=Before(negative_weights_lost)),
            ("ops.elements[indexer_logits/*]",),
        ),
        (
            "topk-duplicate",
            "The largest is chosen twice, the weakest not at all.",
            Ops(topk=Selecting(duplicate)),
            ("ops.topk[topk/*]",),
        ),
        (
            "topk-beyond",
            "Positions that aren't visible yet are chosen.",
            Ops(topk=Before(all_visible)),
            ("ops.topk[topk/*]",),
        ),
        (
            "topk-weakest",
            "The weakest of the chosen is dropped.",
            Ops(topk=Selecting(without_weakest)),
            ("ops.topk[topk/*]",),
        ),
        (
            "topk-late-tie",
            "Of equal scores the last ones are chosen.",
            Ops(topk=last_of_equals),
            ("ops.topk[topk/*]",),
        ),
        (
            "slots-of-nothing",
            "Position -1 becomes the slot 0.",
            Ops(to_slots=After(first_slot)),
            ("ops.exact[to_slots/*]",),
        ),
    )
    return [Mutant(name, doc, Changed(change), dies) for name, doc, change, dies in changes]


def last_head_zeroed(out: Tensor, lse: Tensor) -> Any:
    out = out.clone()
    out[:, -1] = 0
    return out, lse


def gain(out: Tensor, lse: Tensor) -> Any:
    return (out.float() * 1.012).to(out.dtype), lse


def few_bits(honest: Op) -> Op:
    def call(q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float) -> Any:
        out, lse = honest(q, cache, slots, lens, scale)
        finite = torch.where(lse.isneginf(), 0.0, lse)
        column = torch.arange(slots.shape[1], device=slots.device)
        total = torch.zeros_like(out, dtype=torch.bfloat16)
        for start in range(0, slots.shape[1], _CHUNK):
            mine = (column >= start) & (column < start + _CHUNK)
            part, own = honest(q, cache, torch.where(mine, slots, -1), lens, scale)
            total = total + (torch.exp(own - finite).unsqueeze(-1) * part.float()).bfloat16()
        return total.to(out.dtype), lse

    return call


def page_before(q: Tensor, cache: KVCache, slots: Tensor, *more: Any) -> tuple[Any, ...]:
    size = cache.block_size
    edge = (slots % size == size - 1) & (slots >= size)
    return q, cache, torch.where(edge, slots - size, slots), *more


def length_ignored(
    q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float
) -> tuple[Any, ...]:
    return q, cache, slots, torch.full_like(lens, slots.shape[1]), scale


def wider_window(*args: Any) -> tuple[Any, ...]:
    *others, window = args if len(args) == 8 else (*args, None)
    return (*others, None if window is None else window + 1)


def base_two(out: Tensor, lse: Tensor) -> Any:
    return out, lse / math.log(2)


def zero_for_empty(out: Tensor, lse: Tensor) -> Any:
    return out, torch.where(lse.isneginf(), 0.0, lse)


def empty_part_weighed(honest: Op) -> Op:
    def call(outs: Tensor, lses: Tensor) -> Any:
        _, lse = honest(outs, lses)
        weights = torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse))
        return (weights.unsqueeze(-1) * outs.float()).sum(0).to(outs.dtype), lse

    return call


def negative_weights_lost(q: Tensor, weights: Tensor, *more: Any) -> tuple[Any, ...]:
    return q, weights.clamp(min=0), *more


class Selecting:
    """Makes a top-k whose rows of positions are changed, where something was chosen."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.change = change

    def __call__(self, honest: Op) -> Op:
        def call(scores: Tensor, visible: Tensor, k: int) -> Any:
            positions, lens, has_nan = honest(scores, visible, k)
            positions, lens = positions.clone(), lens.clone()
            for row, count in enumerate(lens.tolist()):
                if count > 1:
                    chosen = self.change(positions[row, :count], scores[row])
                    positions[row] = -1
                    positions[row, : len(chosen)] = chosen
                    lens[row] = len(chosen)
            return positions, lens, has_nan

        return call


def duplicate(chosen: Tensor, scores: Tensor) -> Tensor:
    values = scores[chosen.long()]
    found = torch.where(values == values.min(), chosen[values.argmax()], chosen)
    return found.sort().values


def without_weakest(chosen: Tensor, scores: Tensor) -> Tensor:
    weakest = int(scores[chosen.long()].argmin())
    return torch.cat((chosen[:weakest], chosen[weakest + 1 :]))


def all_visible(scores: Tensor, visible: Tensor, k: int) -> tuple[Any, ...]:
    return scores, torch.full_like(visible, scores.shape[1]), k


def last_of_equals(honest: Op) -> Op:
    def call(scores: Tensor, visible: Tensor, k: int) -> Any:
        # Each row is chosen from in reverse, so that the lowest place is the last position.
        turned = torch.full_like(scores, torch.nan)
        for row, count in enumerate(visible.tolist()):
            count = min(count, scores.shape[1])
            turned[row, :count] = scores[row, :count].flip(0)
        positions, lens, has_nan = honest(turned, visible, k)
        positions = positions.clone()
        for row, count in enumerate(lens.tolist()):
            last = min(int(visible[row]), scores.shape[1]) - 1
            positions[row, :count] = (last - positions[row, :count]).sort().values
        return positions, lens, has_nan

    return call


def first_slot(slots: Tensor) -> Tensor:
    return slots.clamp(min=0)
