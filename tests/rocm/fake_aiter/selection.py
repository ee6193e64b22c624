"""The fake's index scores and top-k."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .rules import Misuse, array, floats, ints, need

FP8 = torch.float8_e4m3fn


def fp8_mqa_logits(arch: str, given: dict[str, Any]) -> Tensor:
    rows, heads, width = array("Q", given["Q"], FP8, (None, None, None)).shape
    keys = array("KV", given["KV"], FP8, (None, width))
    scales = floats("kv_scales", given["kv_scales"], len(keys))
    weights = floats("weights", given["weights"], rows, heads)
    starts = ints("cu_starts", given["cu_starts"], rows)
    ends = ints("cu_ends", given["cu_ends"], rows)
    need(heads & (heads - 1) == 0, "num q. heads should be power of 2.")
    need(width & (width - 1) == 0, "head size should be power of 2.")
    empty = -math.inf if given["clean_logits"] else math.nan
    out = torch.full((rows, -(-len(keys) // 256) * 256), empty)[:, : len(keys)]
    for t in range(rows):
        first, last = int(starts[t]), int(ends[t])
        need(first >= 0 and last <= len(keys), "a row's run lies outside of the keys")
        out[t, first:last] = _scored(
            given["Q"][t], keys[first:last], weights[t], scales[first:last]
        )
    return out


def deepgemm_fp8_paged_mqa_logits(arch: str, given: dict[str, Any]) -> None:
    q = array("q_fp8", given["q_fp8"], FP8, (None, None, None, None))
    requests, each, heads, width = q.shape
    size, chunk = given["KVBlockSize"], given["ChunkK"]
    cache = array("kv_cache", given["kv_cache"], torch.uint8, (None, size, 1, width + 4))
    need(chunk % size == 0 or size % chunk == 0, "ChunkK and KVBlockSize")
    need(not given["Preshuffle"] or size % 16 == 0, f"Got KVBlockSize={size}")
    weights = floats("weights", given["weights"], requests * each, heads)
    lengths = ints("context_lens", given["context_lens"], requests)
    table = ints("kv_indices", given["kv_indices"], requests, None)
    out = given["out_logits"]
    array("out_logits", out, torch.float32, (requests * each, None), dense=False)
    pages = cache.view(-1, size * (width + 4))
    for b in range(requests):
        total = int(lengths[b])
        need(total <= given["max_model_len"] and -(-total // size) <= table.shape[1], "too long")
        for n in range(each):
            seen = total - each + 1 + n
            for position in range(max(0, seen)):
                page = pages[int(table[b, position // size])]
                code, scale = _key(page, position % size, size, width, given["Preshuffle"])
                row = b * each + n
                out[row, position] = _scored(q[b, n], code[None], weights[row], scale)[0]


def _key(page: Tensor, t: int, size: int, width: int, tiled: bool) -> tuple[Tensor, Tensor]:
    place = [
        (t // 16) * 16 * width + (c // 16) * 256 + (t % 16) * 16 + c % 16
        if tiled
        else t * width + c
        for c in range(width)
    ]
    scale = page[size * width + 4 * t : size * width + 4 * t + 4]
    return page[place].view(FP8), scale.clone().view(torch.float32)


def _scored(q: Tensor, keys: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    products = torch.relu(q.double() @ keys.double().T)
    return (scales.double() * (weights.double() @ products)).float()


def top_k_per_row_prefill(arch: str, given: dict[str, Any]) -> None:
    rows = given["numRows"]
    starts = ints("rowStarts", given["rowStarts"], rows)
    ends = ints("rowEnds", given["rowEnds"], rows)
    need(given["values"] is None, "values aren't asked for")
    for t in range(rows):
        _choose(arch, given, t, int(starts[t]), int(ends[t]))


def top_k_per_row_decode(arch: str, given: dict[str, Any]) -> None:
    rows, each = given["numRows"], given["next_n"]
    lengths = ints("seqLens", given["seqLens"], rows // each)
    for t in range(rows):
        _choose(arch, given, t, 0, int(lengths[t // each]) - each + 1 + t % each)


def _choose(arch: str, given: dict[str, Any], t: int, first: int, last: int) -> None:
    """Columns of the whole row; what stands behind a short row is left as it was."""
    logits, k = given["logits"], given["k"]
    out = ints("indices", given["indices"], given["numRows"], k)
    need(logits.dtype == torch.float32, "logits")
    need((given["stride0"], given["stride1"]) == logits.stride(), "strides of the logits")
    if arch != "gfx950" or k != 2048:
        raise Misuse(f"top-k of {k} on {arch}")
    row = logits[t].double()
    # NaN counts as the largest, as the bits of a positive one do.
    order = sorted(range(first, max(first, last)), key=lambda s: (not math.isnan(row[s]), -row[s]))
    if given.get("stable"):
        chosen = sorted(order[:k])
    else:  # any order, any of equal scores
        order = sorted(order, key=lambda s: (not math.isnan(row[s]), -row[s], -s))
        chosen = order[:k]
    out[t, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
