"""What works of attention and of caches are held against, in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core_cuda.kernels.topk import topk
from ml4core_cuda.measure.work import Inputs

_BLOCK = 64


def attention_error(inputs: Inputs, found: tuple[Tensor, Tensor]) -> float:
    q, cache, slots, lens, scale = inputs
    most = 64  # a reference of every row of a long chunk would take minutes
    values = cache.layout.unpack(cache.parts, cache.scale).flatten(0, 1)
    worst = 0.0
    for t in range(0, len(q), max(1, len(q) // most)):
        own = values[slots[t, : int(lens[t])].long()].double()
        out, lse = attended(q[t].double(), own, scale)
        worst = max(worst, far_off(found[0][t], out, 4e-3), far_off(found[1][t], lse, 1e-5))
    return worst


def attended(q: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [N, 512] and lse [N] of fp64 queries [N, 576] over keys [n, 576]."""
    scores = scale * (q @ keys.T)
    return torch.softmax(scores, -1) @ keys[:, :512], torch.logsumexp(scores, -1)


def window_error(inputs: Inputs, found: tuple[Tensor, Tensor]) -> float:
    q, cache, table, _, visible, each, scale, window = inputs
    values = cache.layout.unpack(cache.parts, cache.scale)
    worst = 0.0
    for t in range(0, len(q), max(1, len(q) // 16)):
        last = int(visible[t])
        first = 0 if window is None else max(0, last - window)
        keys = values[table[t // each].long()].flatten(0, 1)[first:last].double()
        out, lse = attended(q[t].double(), keys, scale)
        worst = max(worst, far_off(found[0][t], out, 4e-3), far_off(found[1][t], lse, 1e-5))
    return worst


def logits_error(inputs: Inputs, found: Tensor) -> float:
    q, weights, scale, cache, table, _, visible, _ = inputs
    layout = cache.layout
    assert layout.encode is not None
    assert layout.decode is not None
    seen_q = layout.decode(layout.encode(q, None), None).double()
    values = layout.unpack(cache.parts, cache.scale)
    worst = 0.0
    for t in range(0, len(q), max(1, len(q) // 4)):
        last = int(visible[t])
        keys = values[table[t].long()].flatten(0, 1)[:last].double()
        factor = weights[t].double() * scale
        scores = factor @ torch.relu(seen_q[t] @ keys.T)
        size = factor.abs() @ (seen_q[t].abs() @ keys.abs().T)
        # As the contract's judge allows an fp32 sum over 128 values and some heads.
        allowed = 4 * 2.0**-23 * (128**0.5 + q.shape[1] ** 0.5) * size + 1e-30
        worst = max(worst, float(((found[t, :last] - scores).abs() / allowed).max()))
    return worst


def topk_error(inputs: Inputs, found: Any) -> float:
    scores, _, k, table, _, size = inputs
    order = torch.sort(scores, dim=-1, descending=True, stable=True)[1][:, :k]
    want = order.sort(-1)[0].to(torch.int32)
    if isinstance(found, Tensor):  # a peer's: any of equal scores will do
        got = scores.gather(-1, found.long()).sort(-1)[0]
        return 0.0 if torch.equal(got, scores.gather(-1, order).sort(-1)[0]) else float("inf")
    place = want.long()
    slots = table.gather(1, place // size) * size + place % size
    right = torch.equal(found.positions, want) and torch.equal(found.slots, slots.to(torch.int32))
    again = topk(scores, inputs[1], k)
    return 0.0 if right and torch.equal(again[0], want) else float("inf")


def write_error(inputs: Inputs, found: Tensor) -> float:
    cache, slots, *rest = inputs
    x = torch.cat([part.float() for part in rest], -1)
    grid = torch.zeros(cache.blocks * cache.block_size, x.shape[1], device=x.device)
    grid[slots] = x
    (want,) = cache.layout.pack(grid.view(cache.blocks, cache.block_size, -1), cache.scale)
    got = cache.layout.unpack((found,), cache.scale).flatten(0, 1)[slots]
    due = cache.layout.unpack((want,), cache.scale).flatten(0, 1)[slots]
    return 0.0 if torch.equal(got, due) else float("inf")


def empty(layout: Any, blocks: int, device: torch.device) -> KVCache:
    parts = tuple(
        torch.zeros(part.shape(blocks, _BLOCK), dtype=getattr(torch, part.dtype), device=device)
        for part in layout.parts
    )
    return KVCache(layout, _BLOCK, parts, torch.full((1,), 0.25, device=device))


def far_off(found: Tensor, want: Tensor, allowed: float) -> float:
    """Relative distance, for what is allowed; infinite for NaN."""
    found_far = float((found.double() - want).norm() / want.norm().clamp(min=1e-30)) / allowed
    return found_far if found_far == found_far else float("inf")
