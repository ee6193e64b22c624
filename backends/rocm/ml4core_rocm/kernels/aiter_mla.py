"""AITER's persistent sparse decoding as a provider of ``sparse_mla``.

Every query row is an entry of its own, with one query and a page size of 1, over a stream of slots.
Which compute unit works on which part of which row is planned once a step from the rows' lengths,
which all layers share; the count of splits is stated, as without it the library may leave the
persistent kernel, which alone follows the plan.

Queries of an FP8 cache become FP8 with one scale, that of a bf16 cache stay bf16. Heads come in
sixteens: 8 are repeated, and every second one is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, LayerKV, LayerSpec, Selection, StepPlan
from ml4core_rocm.aiter_functions import load
from ml4core_rocm.kernels.slot_streams import Streams, starts_of, stream_at
from ml4core_rocm.kernels.target import arch_of
from ml4core_triton.kernels.target import units_of

WIDTH = 576
LATENT = 512
MAX_HEADS = 128

_FP8 = {"e4m3": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}
_GRANULARITY = 16
_KEYS_EACH = 128
"""Keys that a split has at least."""


@dataclass(frozen=True)
class MlaPlan:
    """What the persistent kernel is told of the rows of a step; layers of one kind share it.

    Attributes:
        heads: with those that fill up the last sixteen.
        starts: int32 [T + 1], where each row's slots begin in the stream.
        query_start, last_page: int32 [T + 1] and [T]: one query a row, one token a page.
        work: the library's six arrays, by the names of the decoding call.
    """

    heads: int
    splits: int
    starts: Tensor
    query_start: Tensor
    last_page: Tensor
    work: dict[str, Tensor]


def padded_heads(heads: int) -> int:
    return -(-heads // 16) * 16


def plan_mla(
    starts: Tensor, topk: int, heads: int, q_dtype: torch.dtype, kv: torch.dtype
) -> MlaPlan:
    """The plan for rows of ``topk`` keys at most, which begin at ``starts`` int32 [T + 1]."""
    rows, device = starts.shape[0] - 1, starts.device
    padded = padded_heads(heads)
    splits = min(_power_from(topk // _KEYS_EACH), units_of(device))
    described = load("get_mla_metadata_info_v1")(
        rows, 1, padded, q_dtype, kv,
        is_sparse=True, fast_mode=True, num_kv_splits=splits, max_split_per_batch=splits,
    )  # fmt: skip
    meta, work_indptr, work_info, reduce_indptr, final_map, partial_map = (
        torch.empty(shape, dtype=dtype, device=device) for shape, dtype in described
    )
    query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
    last_page = torch.ones(rows, dtype=torch.int32, device=device)
    # Not the order in which the arrays were described: work_info goes before work_indptr.
    load("get_mla_metadata_v1")(
        query_start, starts, last_page, padded, 1, True,
        meta, work_info, work_indptr, reduce_indptr, final_map, partial_map,
        page_size=1, kv_granularity=_GRANULARITY, max_seqlen_qo=1, uni_seqlen_qo=1, fast_mode=True,
        max_split_per_batch=splits, dtype_q=q_dtype, dtype_kv=kv,
    )  # fmt: skip
    work = {
        "work_meta_data": meta,
        "work_indptr": work_indptr,
        "work_info_set": work_info,
        "reduce_indptr": reduce_indptr,
        "reduce_final_map": final_map,
        "reduce_partial_map": partial_map,
    }
    return MlaPlan(padded, splits, starts, query_start, last_page, work)


def _power_from(n: int) -> int:
    """The least power of two that is not below ``n``, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def cache_rows(cache: KVCache) -> tuple[Tensor, Tensor | None]:
    """Rows [all slots, 1, 1, 576] in the kernel's dtype, and the cache's scale. ``ValueError`` for
    another layout or width, and for pages that aren't dense.
    """
    cache.require("bf16", *_FP8)
    rows = cache.parts[0]
    if rows.shape[-1] != WIDTH or not rows.is_contiguous():
        raise ValueError(
            f"AITER reads dense rows of {WIDTH} values; these are {list(rows.shape)} with strides "
            f"{rows.stride()}"
        )
    if cache.layout.id in _FP8:
        rows = rows.view(_FP8[cache.layout.id])
        scale = cache.scale
        if scale is None:
            scale = torch.ones(1, device=rows.device)
        return rows.view(-1, 1, 1, WIDTH), scale
    return rows.view(-1, 1, 1, WIDTH), None


def decode(
    q: Tensor, cache: KVCache, plan: MlaPlan, stream: Tensor, lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """``q`` bf16 [T, N, W] over each row's run of ``stream`` int32, of ``lens`` [T]: out [T, N, L]
    bf16 and lse fp32 [T, N], base e; 0 and -inf for rows without keys.
    """
    rows, kv_scale = cache_rows(cache)
    count, heads, width = q.shape
    some = (lens > 0)[:, None]
    if width < WIDTH:
        # The rope part of such a row is zeros, and so is what meets it.
        q = torch.cat((q, q.new_zeros(count, heads, WIDTH - width)), -1)
    q_scale = None
    if rows.dtype != torch.bfloat16:
        q, q_scale = _in_fp8(q, some, rows.dtype)
    repeat = plan.heads // heads if 16 % heads == 0 else 1
    if repeat > 1:
        q = q.view(torch.uint8 if q_scale is not None else q.dtype)
        q = q.repeat_interleave(repeat, 1).view(rows.dtype)
    elif plan.heads > heads:
        missing = (count, plan.heads - heads, WIDTH)
        more = torch.zeros(missing, dtype=torch.uint8, device=q.device)
        if q_scale is None:
            q = torch.cat((q, more.to(q.dtype)), 1)
        else:
            q = torch.cat((q.view(torch.uint8), more), 1).view(rows.dtype)
    out = torch.empty(count, plan.heads, LATENT, dtype=torch.bfloat16, device=q.device)
    _, lse = load("mla_decode_fwd")(
        q.contiguous(), rows, out, plan.query_start, plan.starts, stream, plan.last_page, 1,
        page_size=1, nhead_kv=1, sm_scale=scale, num_kv_splits=plan.splits, q_scale=q_scale,
        kv_scale=kv_scale, return_lse=True, **plan.work,
    )  # fmt: skip
    out, lse = out[:, ::repeat][:, :heads], lse[:, ::repeat][:, :heads]
    return (
        torch.where(some[..., None], out, 0.0).contiguous(),
        torch.where(some, lse, float("-inf")).contiguous(),
    )


def _in_fp8(q: Tensor, some: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of a step's queries, and their one scale fp32 [1]: of rows that have keys, so that
    what pads a step leaves no trace.
    """
    most = 448.0 if dtype == torch.float8_e4m3fn else 224.0
    size = q.float().abs().nan_to_num(0.0, 0.0, 0.0) * some[..., None]
    scale = (size.amax() / most).clamp(min=1e-10).view(1) if q.numel() else q.new_ones(1).float()
    return (q.float() / scale).clamp(-most, most).to(dtype), scale


def sparse_mla(
    q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The contract of ``sparse_mla`` for bf16 queries of up to 128 heads: what is no slot of the
    cache is taken out first, as the kernel would attend to it. ``ValueError`` for anything else.
    """
    slots, lens = packed(slots, lens, cache.blocks * cache.block_size)
    plan = plan_for(q, cache, starts_of(lens), slots.shape[1])
    return decode(q, cache, plan, stream_at(slots, lens, plan.starts), lens, scale)


def plan_for(q: Tensor, cache: KVCache, starts: Tensor, topk: int) -> MlaPlan:
    """``plan_mla`` for these queries [T, N, W]. ``ValueError`` for what no kernel exists for."""
    heads, width = q.shape[1:]
    if q.dtype != torch.bfloat16 or heads > MAX_HEADS or width not in (LATENT, WIDTH):
        raise ValueError(
            f"AITER takes bf16 queries of {LATENT} or {WIDTH} values and up to {MAX_HEADS} heads, "
            f"got {q.dtype} {list(q.shape)}"
        )
    fp8 = _FP8.get(cache.layout.id)
    wanted = {"gfx950": torch.float8_e4m3fn, "gfx942": torch.float8_e4m3fnuz}
    if fp8 is not None and wanted.get(arch_of(q.device)) not in (None, fp8):
        raise ValueError(f"{arch_of(q.device)} doesn't read caches of {cache.layout.id!r}")
    kv = fp8 or torch.bfloat16
    return plan_mla(starts, topk, heads, fp8 or q.dtype, kv)


def packed(slots: Tensor, lens: Tensor, all_slots: int) -> tuple[Tensor, Tensor]:
    """Slots int32 [T, k] with those of the cache among the first ``lens`` in front, in their order,
    -1 behind; and how many they are, int32 [T].
    """
    column = torch.arange(slots.shape[1], device=slots.device)
    valid = (column < lens.unsqueeze(1)) & (slots >= 0) & (slots < all_slots)
    order = torch.where(valid, column, slots.shape[1] + column).argsort(1)
    count = valid.sum(1, dtype=torch.int32)
    front = slots.gather(1, order)
    return torch.where(column < count.unsqueeze(1), front, -1), count


class SparseMlaStage:
    """The stage ``sparse_mla`` of layers that choose keys. The plan of a step and the stream of a
    selection are made by the first layer that needs them and kept for the next ones of the step.
    """

    def __init__(self, layer: LayerSpec, shared: StepPlans) -> None:
        self._scale = layer.softmax_scale
        self._shared = shared

    def __call__(
        self, plan: StepPlan, kv: LayerKV, q: Tensor, selection: Selection | None
    ) -> tuple[Tensor, Tensor]:
        if selection is None:
            raise ValueError("AITER's sparse decoding serves layers that choose their keys")
        mla, stream = self._shared.of(plan, kv.latent, q, selection)
        return decode(q, kv.latent, mla, stream, selection.lens, self._scale)


class StepPlans(Streams):
    """The plans and the stream of the forward that runs; of the one before nothing is kept.

    A plan depends on where the rows begin in the stream alone, so on their lengths, clamped at
    top-k: it is made once for all layers of a count of heads, a layout and a top-k, and steps of
    the same clamped lengths make the same plan.

    A later step doesn't take it over, though its lengths may be the same ones, as only the device
    knows them. The host queues a step before it is told how many drafts the one before it accepted,
    which is what moves the rows of the next; and a graph's replay asks no host at all. To compare
    lengths, the host would wait for the device in each step. Planning is one launch, which a graph
    records with the step that needs it, so a replay plans anew, into the arrays that its layers
    were captured with.
    """

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[Any, MlaPlan] = {}

    def _forget(self) -> None:
        self._plans = {}

    def of(
        self, step: StepPlan, cache: KVCache, q: Tensor, selection: Selection
    ) -> tuple[MlaPlan, Tensor]:
        """Those for queries [T, N, W] of a layer over its selection."""
        starts, stream = self.stream(step, cache, selection)
        width = selection.slots.shape[1]
        key = (q.shape[1], cache.layout.id, width)
        if key not in self._plans:
            self._plans[key] = plan_for(q, cache, starts, width)
        return self._plans[key], stream


def stage(layer: LayerSpec, shared: StepPlans) -> Callable[..., tuple[Tensor, Tensor]]:
    """The stage for a layer; layers of one session share their plans."""
    return SparseMlaStage(layer, shared)
