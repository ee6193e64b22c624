"""The fake's persistent decoding: it does the works that the plan lists, and no others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ml4core_conformance.oracle.attention import attend

from .rules import array, floats, ints, need

FP8 = {"gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
UNITS = {"gfx950": 256, "gfx942": 304}
_NAMES = (
    "work_metadata_ptrs",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


def describe(arch: str, rows: int, heads: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes of the plan's arrays for one query a row."""
    units, tiles = UNITS[arch], -(-heads // 16)
    works, partials = rows + units - 1, min(rows + units - 1, 2 * (units - 1))
    shapes: tuple[tuple[int, ...], ...] = (
        (2,), (units + 1,), (works * tiles, 8), (rows * tiles + 1,), (rows * tiles, 2),
        (partials * tiles,),
    )  # fmt: skip
    dtypes = (torch.uint64, *(torch.int32,) * 5)
    return dict(zip(_NAMES, zip(shapes, dtypes, strict=True), strict=True))


def get_mla_metadata_info_v1(arch: str, given: dict[str, Any]) -> tuple[Any, ...]:
    need(given["num_head_qo"] % 8 == 0, f"num_head_qo={given['num_head_qo']}")
    need(given["is_sparse"] and given["fast_mode"], "rows of a stream are planned as sparse, fast")
    need(given["max_seqlen_qo"] == 1, "one query a row")
    return tuple(describe(arch, given["batch_size"], given["num_head_qo"]).values())


def get_mla_metadata_v1(arch: str, given: dict[str, Any]) -> None:
    rows = given["kv_last_page_lens"].shape[0]
    heads = given["num_heads_per_head_k"] * given["num_heads_k"]
    for name, (shape, dtype) in describe(arch, rows, heads).items():
        array(name, given[name], dtype, shape)
    starts = ints("seqlens_kv_indptr", given["seqlens_kv_indptr"], rows + 1)
    queries = ints("seqlens_qo_indptr", given["seqlens_qo_indptr"], rows + 1)
    ints("kv_last_page_lens", given["kv_last_page_lens"], rows)
    need(given["page_size"] == 1 and bool((given["kv_last_page_lens"] == 1).all()), "page size")
    need(given["uni_seqlen_qo"] == given["max_seqlen_qo"] == 1, "one query a row")
    works, indptr = given["work_info_set"], given["work_indptr"]
    units = indptr.shape[0] - 1
    listed = []
    for row in range(rows):
        first, last = int(starts[row]), int(starts[row + 1])
        if first < last:
            span = (int(queries[row]), int(queries[row + 1]), first, last)
            listed.append((row, -1, *span, 0, 0))
    need(len(listed) <= works.shape[0], "more works than the array holds")
    works[: len(listed)] = torch.tensor(listed, dtype=torch.int32).view(-1, 8)
    # The first units take the works, one each and the last of them the rest.
    indptr[:] = torch.arange(units + 1, dtype=torch.int32).clamp(max=len(listed))
    indptr[-1] = len(listed)


def mla_decode_fwd(arch: str, given: dict[str, Any]) -> tuple[None, Tensor | None]:
    q, rows = given["q"], given["kv_buffer"]
    need(given["logit_cap"] <= 0, "logit_cap")
    need(given["page_size"] == given["nhead_kv"] == given["max_seqlen_q"] == 1, "a stream of slots")
    need(q.dtype == rows.dtype, f"queries of {q.dtype} over rows of {rows.dtype}")
    need(q.dtype in (torch.bfloat16, FP8[arch]), f"{q.dtype} on {arch}")
    count, heads, _ = array("q", q, q.dtype, (None, None, 576)).shape
    array("kv_buffer", rows, q.dtype, (None, 1, 1, 576))
    out = array("o", given["o"], torch.bfloat16, (count, heads, 512))
    # Native: 16, and in FP8 on gfx950 32, 64 and 128. Others of 32, 48 .. 128 are folded.
    need(heads == 16 or heads in range(32, 129, 16), f"nhead={heads} and max_seqlen_q=1")
    queries = ints("qo_indptr", given["qo_indptr"], count + 1)
    starts = ints("kv_indptr", given["kv_indptr"], count + 1)
    slots = ints("kv_indices", given["kv_indices"], None)
    ints("kv_last_page_lens", given["kv_last_page_lens"], count)
    need(torch.equal(queries.cpu(), torch.arange(count + 1, dtype=torch.int32)), "qo_indptr")
    need(int(starts[-1]) <= slots.shape[0], "kv_indptr goes beyond kv_indices")
    factor = 1.0
    if q.dtype != torch.bfloat16:
        q_scale = floats("q_scale", given["q_scale"], 1)
        factor = float(q_scale) * float(floats("kv_scale", given["kv_scale"], 1))
    else:
        need(given["q_scale"] is None and given["kv_scale"] is None, "scales of bf16")
    for name, (shape, dtype) in describe(arch, count, heads).items():
        value = given["work_meta_data" if name == "work_metadata_ptrs" else name]
        array(name, value, dtype, shape)
    lse = torch.full((count, heads), math.nan) if given["return_lse"] else None
    out.fill_(math.nan)  # rows that no work is for are left as the memory was
    if given["num_kv_splits"] is None and heads == 16 and q.dtype == torch.bfloat16 and count >= 32:
        return None, lse  # leaves the persistent kernel, and what it does then isn't the plan
    scale = given["sm_scale"] or 576**-0.5
    v_scale = 1.0 if given["kv_scale"] is None else float(given["kv_scale"])
    table = rows.view(-1, 576)
    works = given["work_info_set"][: int(given["work_indptr"][-1])].tolist()
    for row, partial, q_first, _, first, last, *_ in works:
        need(partial == -1, "a work of this plan owns its row")
        need(q_first == row and (first, last) == (int(starts[row]), int(starts[row + 1])),
             "the plan is of other lengths")  # fmt: skip
        chosen = slots[first:last].long()
        need(bool(((chosen >= 0) & (chosen < len(table))).all()), f"row {row} reads outside")
        keys = table[chosen].double()
        found = attend(q[row].double(), keys, scale * factor)
        out[row] = (found.out * v_scale).to(torch.bfloat16)
        if lse is not None:
            lse[row] = found.lse.float()
    return None, lse
