"""Wrong attention, joins and selection die at the family that speaks of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache

from .wrapped import (
    Change,
    Op,
    after,
    backend,
    before,
    dies,
    page_off,
)


def _every_slot(q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float) -> Any:
    return q, cache, slots, torch.full_like(lens, slots.shape[1]), scale


def _front_packed(q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float) -> Any:
    stop = torch.where(slots < 0, torch.arange(slots.shape[1]), slots.shape[1]).amin(-1)
    return q, cache, slots, torch.minimum(lens, stop.int()), scale


def _head_of_zeros(out: Tensor, lse: Tensor) -> Any:
    out = out.clone()
    out[:, -1] = 0
    return out, lse


def _few_bits(op: Op) -> Op:
    """Values added up one after the other in bfloat16."""

    def attend(q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float) -> Any:
        out, lse = op(q, cache, slots, lens, scale)
        rows = cache.layout.unpack(cache.parts, cache.scale).flatten(0, 1)
        for t, length in enumerate(lens.tolist()):
            keys = rows[slots[t, :length]]
            weights = torch.exp(scale * (q[t].float() @ keys.T) - lse[t].unsqueeze(-1))
            total = torch.zeros(out.shape[1:], dtype=torch.bfloat16)
            for s in range(length):
                total = total + (weights[:, s : s + 1] * keys[s, :512]).bfloat16()
            out[t] = total.to(out.dtype)
        return out, lse

    return attend


LATENT = "sparse_mla/fp8_ds_mla+bf16"
NAN_LSE = after(lambda out, lse: (out, torch.where(lse.isneginf(), 0.0, lse)))


@pytest.mark.parametrize(
    ("op", "change", "check", "small"),
    [
        (
            "sparse_mla",
            after(lambda out, lse: (out, lse / math.log(2))),
            f"ops.lse[{LATENT}]",
            True,
        ),
        ("sparse_mla", NAN_LSE, f"ops.lse[{LATENT}]", True),
        ("sparse_mla", after(lambda out, lse: (out, -lse)), f"ops.lse[{LATENT}]", True),
        ("window_mla", NAN_LSE, "ops.lse[window_mla/bf16+fp32]", True),
        ("sparse_mla", after(lambda o, lse: (o, lse / math.log(2))), f"ops.merge[{LATENT}]", True),
        ("sparse_mla", NAN_LSE, f"ops.merge[{LATENT}]", True),
        ("merge_lse", before(lambda o, lse: (o, lse * math.log(2))), f"ops.merge[{LATENT}]", True),
        ("merge_lse", after(lambda o, lse: (o * 1.012, lse)), "ops.merge[merge_lse/bf16]", True),
        ("sparse_mla", before(page_off), f"ops.elements[{LATENT}]", True),
        ("sparse_mla", before(_every_slot), f"ops.elements[{LATENT}]", True),
        ("sparse_mla", before(_front_packed), f"ops.elements[{LATENT}]", True),
        ("sparse_mla", after(_head_of_zeros), f"ops.structure[{LATENT}]", True),
        ("sparse_mla", after(lambda o, lse: (o * 1.012, lse)), f"ops.bias[{LATENT}]", True),
        ("sparse_mla", _few_bits, f"ops.elements[{LATENT}]", False),
        ("sparse_mla", _few_bits, "ops.elements[sparse_mla/fp32+fp32]", False),
    ],
)
def test_wrong_attention_dies(op: str, change: Change, check: str, small: bool) -> None:
    dies(backend({op: change}), check, "case", small=small)


def test_another_base_is_named() -> None:
    two = backend({"sparse_mla": after(lambda out, lse: (out, lse / math.log(2)))})
    dies(two, f"ops.lse[{LATENT}]", "base 2")


def _nan_in_empty(op: Op) -> Op:
    def merge(outs: Tensor, lses: Tensor) -> Any:
        _, lse = op(outs, lses)
        weights = torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse))
        return (weights.unsqueeze(-1) * outs.float()).sum(0).to(outs.dtype), lse

    return merge


def test_a_part_without_keys_leaves_no_trace() -> None:
    dies(backend({"merge_lse": _nan_in_empty}), "ops.merge[merge_lse/fp32]", "NaN")


def _topk(choose: Callable[[Tensor, int, int], list[int]], nan: bool = True) -> Change:
    """A top-k made of a choice from a row's visible scores."""

    def change(op: Op) -> Op:
        def topk(scores: Tensor, visible: Tensor, k: int) -> Any:
            positions, lens, has_nan = op(scores, visible, k)
            positions, lens = positions.clone(), lens.clone()
            for t, seen in enumerate(visible.tolist()):
                picked = choose(scores[t], seen, k)
                positions[t] = -1
                positions[t, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
                lens[t] = len(picked)
            return positions, lens, has_nan if nan else torch.zeros_like(has_nan)

        return topk

    return change


def _best(row: Tensor, seen: int, k: int, last: bool = False) -> list[int]:
    values = row[:seen].tolist()
    numbers = [s for s, value in enumerate(values) if not math.isnan(value)]
    order = sorted(numbers, key=lambda s: (-values[s], -s if last else s))
    return sorted(order[:k])


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda row, seen, k: _best(row, seen, k, last=True), "chosen"),
        (lambda row, seen, k: [*_best(row, seen, k)[:-1], *_best(row, seen, k)[:1]], "twice"),
        (lambda row, seen, k: _best(row, len(row), k), "candidates"),
        (lambda row, seen, k: _best(row, seen, k)[1:], "wanted are"),
        (lambda row, seen, k: _best(row, seen, k)[::-1], "ascending"),
        (
            lambda row, seen, k: _best(row.nan_to_num(9.0, math.inf, -math.inf), seen, k),
            "NaN",
        ),
        (lambda row, seen, k: [s for s in _best(row, seen, k) if row[s] > -math.inf], "wanted are"),
    ],
)
def test_wrong_selection_dies(choose: Callable[..., list[int]], words: str) -> None:
    dies(backend({"topk": _topk(choose)}), "ops.topk[topk/scores]", words)


def test_nan_untold_dies() -> None:
    dies(backend({"topk": _topk(_best, nan=False)}), "ops.topk[topk/scores]", "has_nan")
