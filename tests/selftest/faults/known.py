"""Known public faults of ops, layouts and models, each with a backend that has it.

A fault is written in our own words. ``families`` are the checks that carry its id; the wrong
backend has to be red at the check ``dies_at``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Accepted, KVCache, Weight
from ml4core.api.known_layouts import latent_layout
from ml4core_conformance.mutants.altered import After, AlteredSession, Before, Change, Op, Ops
from ml4core_conformance.rigs.scenes import composed


@dataclass(frozen=True)
class Fault:
    line: str
    families: tuple[str, ...]
    dies_at: str
    change: Change


def nan_first(scores: Tensor, visible: Tensor, k: int) -> tuple[Any, ...]:
    return torch.nan_to_num(scores, nan=torch.inf), visible, k


class Restless:
    """Of equal scores others win with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, honest: Op) -> Op:
        def call(scores: Tensor, visible: Tensor, k: int) -> Any:
            self.calls += 1
            positions, lens, has_nan = honest(scores, visible, k)
            column = torch.arange(scores.shape[1])
            for t in range(len(scores)):
                chosen = positions[t, : lens[t]].long()
                low = scores[t, chosen].min() if len(chosen) else 0.0
                seen = column[: visible[t]][scores[t, : visible[t]] == low]
                last = chosen[scores[t, chosen] == low]
                fresh = seen.roll(self.calls)[: len(last)]
                keep = chosen[scores[t, chosen] != low]
                positions[t, : lens[t]] = torch.cat((keep, fresh)).sort().values.int()
            return positions, lens, has_nan

        return call


def one_flag_for_both(session: AlteredSession) -> None:
    """The indexer's pairs are those of attention."""
    rope = session.honest["rope"]
    ops = {**session.honest, "rope": lambda x, at, freq, pairs, m: rope(x, at, freq, True, m)}

    def extra(stage: str, layer: Any, shape: Any) -> Sequence[Any]:
        if stage != "attn_inputs" or layer is None or layer.rope is None:
            return ()
        return (Accepted("wrong", composed(session.inner, ops, stage, layer, shape)),)

    session.extra = extra


def two_rows_a_request(honest: Op) -> Op:
    """Rows of a request from the third on are scored as its second."""

    def call(q: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        start = rest[3]
        row = torch.arange(len(q))
        first = torch.zeros_like(row)
        for begin in start[:-1].tolist():
            first = torch.where(row >= begin, begin, first)
        source = torch.minimum(row, first + 1)
        found: Tensor = honest(q[source], weights[source], *rest)
        return found

    return call


def search_in_nothing(honest: Op) -> Op:
    def call(*args: Any) -> Any:
        visible = args[6]
        if not bool((visible > 0).any()):
            raise IndexError("no work to be planned")
        return honest(*args)

    return call


def online_softmax(honest: Op) -> Op:
    """Tiles of 16 slots: one that holds no key at first spoils the row."""

    def call(q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float) -> Any:
        out, lse = honest(q, cache, slots, lens, scale)
        ahead = (slots[:, :16] < 0).all(-1) & (slots >= 0).any(-1) & (lens > 16)
        out[ahead] = torch.nan
        return out, lse

    return call


def tail_attended(q: Any, cache: Any, slots: Tensor, lens: Tensor, scale: Any) -> tuple[Any, ...]:
    return q, cache, slots, torch.full_like(lens, slots.shape[1]), scale


def last_row_kept(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The last row is what a fresh allocation holds."""
    fresh = torch.empty_like(out)
    fresh[:-1] = out[:-1]
    return fresh, lse


def unselected_times_zero(honest: Op) -> Op:
    def call(q: Tensor, cache: KVCache, *rest: Any) -> Any:
        out, lse = honest(q, cache, *rest)
        scale = None if cache.scale is None else cache.scale
        rows = cache.layout.unpack(cache.parts, scale).flatten(0, 1)
        return out + 0 * rows.sum(), lse

    return call


def other_flavour(honest: Op) -> Op:
    def call(cache: KVCache, slots: Tensor) -> Any:
        layout = latent_layout("e4m3fnuz") if cache.layout.id == "e4m3" else cache.layout
        return honest(replace(cache, layout=layout), slots)

    return call


def overflow_is_nan(cache: Any, slots: Any, latent: Tensor, *rope: Any) -> tuple[Any, ...]:
    """Beyond the largest number of E4M3, and half a step, there is NaN."""
    scale = 1.0 if cache.scale is None else float(cache.scale)
    beyond = latent.abs() / scale > 464
    return cache, slots, torch.where(beyond, torch.nan, latent), *rope


def two_bytes_each(session: AlteredSession) -> None:
    allocate = session.inner.alloc_kv

    def call(layout: Any, blocks: int, block_size: int) -> KVCache:
        cache = allocate(layout, blocks, block_size)
        if layout.role == "latent":
            return cache
        wide = tuple(torch.cat((part, torch.zeros_like(part)), -1) for part in cache.parts)
        return replace(cache, parts=wide)

    session.alloc_kv = call  # type: ignore[attr-defined]


def pages_side_by_side(honest: Op) -> Op:
    """Pages are written where they would lie without gaps."""

    def call(cache: KVCache, *rest: Any) -> Any:
        parts = []
        for part in cache.parts:
            size = part.shape[1:].numel()
            dense = torch.as_strided(part, part.shape, (size, *part.stride()[1:]))
            parts.append(dense)
        return honest(replace(cache, parts=tuple(parts)), *rest)

    return call


def placeholder_scale(weight: Weight) -> Weight:
    """Empty groups have the scale byte that is NaN."""
    if weight.format != "nvfp4":
        return weight
    code = weight.parts["data"].unflatten(-1, (-1, 8))
    empty = ((code & 0x77) == 0).all(-1)
    scale = torch.where(empty, 0x7F, weight.parts["scale"])
    return replace(weight, parts={**weight.parts, "scale": scale})


def offset_of_experts(
    x: Any, w13: Weight, w2: Any, weights: Any, ids: Any, *first: Any
) -> tuple[Any, ...]:
    """From the second expert on scales are read behind a padding that isn't there."""
    if w13.format == "nvfp4" and w13.shape[-1] % 128:
        scale = w13.parts["scale"].clone()
        scale[1:] = scale[1:].roll(1, -2)
        w13 = replace(w13, parts={**w13.parts, "scale": scale})
    return x, w13, w2, weights, ids, *first


def padding_of_scales(honest: Op) -> Op:
    def call(x: Tensor, weight: Weight, *rest: Any) -> Tensor:
        found: Tensor = honest(x, weight, *rest)
        if weight.format == "nvfp4" and weight.parts["scale"].shape[-1] % 4:
            found = found + torch.nan
        return found

    return call


def always_floor(x: Tensor, format: str, *rule: Any) -> tuple[Any, ...]:
    return x, format, "floor" if format == "mxfp4" and x.ndim == 2 else (rule or (None,))[0]


def floor_of_blocks(x: Any, weight: Weight, *rest: Any) -> tuple[Any, ...]:
    """The scales of a last block that is cut are those of the block before."""
    if weight.format == "fp8_block":
        scale, rows = weight.parts["scale"].clone(), weight.shape[-2]
        if rows % 128 and rows > 128:
            scale[..., -1, :] = scale[..., -2, :]
        weight = replace(weight, parts={**weight.parts, "scale": scale})
    return x, weight, *rest


def local_position(x: Any, positions: Tensor, spec: Any, *rest: Any) -> tuple[Any, ...]:
    return x, positions % 2048, spec, *rest


def base_two(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse / torch.log(torch.tensor(2.0))


def base_two_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs, lses * torch.log(torch.tensor(2.0))


def empty_part_counts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs, lses.clamp(min=-1e4)


def sentinel(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    broken = (weights == 0).all(-1, keepdim=True)
    return weights, torch.where(broken, 128, ids)


def folded_heads(honest: Op) -> Op:
    """32 heads go through a path that takes two of them for one."""

    def call(q: Tensor, *rest: Any) -> Any:
        if q.shape[1] == 32:
            q = q.unflatten(1, (16, 2))[:, :, :1].expand(-1, -1, 2, -1).flatten(1, 2)
        return honest(q, *rest)

    return call


_SPARSE = "sparse_mla/fp32+fp32"


def _fault(line: str, families: tuple[str, ...], dies_at: str, **ops: Callable[[Op], Op]) -> Fault:
    return Fault(line, families, dies_at, Ops(**ops))


FAULTS: Mapping[str, Fault] = {
    "B001": _fault(
        "NaN scores are chosen as keys",
        ("ops.topk", "stages.nan", "stages.select"),
        "ops.topk[topk/scores]",
        topk=Before(nan_first),
    ),
    "B003": _fault(
        "ties at the last place are decided anew with each call",
        ("ops.topk", "ops.repeat"),
        "ops.repeat[topk/scores]",
        topk=Restless(),
    ),
    "B005": Fault(
        "the indexer rotates the pairs of attention",
        ("stages.attn_inputs", "ops.elements"),
        "stages.attn_inputs[prefill/reference]",
        one_flag_for_both,
    ),
    "B009": _fault(
        "verify windows of more than two rows are scored wrongly",
        ("ops.elements", "stages.select"),
        "ops.elements[indexer_logits/planar_f32+fp32]",
        indexer_logits=two_rows_a_request,
    ),
    "B011": _fault(
        "a batch without any key breaks the planner",
        ("ops.signature", "ops.elements"),
        "ops.elements[indexer_logits/planar_f32+fp32]",
        indexer_logits=search_in_nothing,
    ),
    "B014": _fault(
        "a first tile without keys makes NaN of its row",
        ("ops.anomalies", "ops.elements"),
        f"ops.anomalies[{_SPARSE}]",
        sparse_mla=online_softmax,
    ),
    "B016": _fault(
        "slots behind the stated length are attended to",
        ("ops.elements", "ops.anomalies"),
        f"ops.elements[{_SPARSE}]",
        sparse_mla=Before(tail_attended),
    ),
    "B018": _fault(
        "a returned row was never written",
        ("ops.written", "stages.sparse_mla"),
        f"ops.written[{_SPARSE}]",
        sparse_mla=After(last_row_kept),
    ),
    "B020": _fault(
        "what is not selected is multiplied by zero, and is NaN",
        ("ops.anomalies", "ops.elements", "model.pages"),
        f"ops.anomalies[{_SPARSE}]",
        sparse_mla=unselected_times_zero,
    ),
    "B021": _fault(
        "bytes are read as the other flavour of E4M3",
        ("layout.codes", "layout.tag"),
        "layout.codes[kv/e4m3]",
        gather_kv=other_flavour,
    ),
    "B023": _fault(
        "what is too large for E4M3 becomes NaN",
        ("layout.bytes", "layout.cross_read", "bytes.quantize"),
        "layout.bytes[kv_write/e4m3+fp32]",
        kv_write=Before(overflow_is_nan),
    ),
    "B027": Fault(
        "a token costs other bytes than its layout says",
        ("layout.size", "model.kv_bytes"),
        "layout.size[index/planar_f32]",
        two_bytes_each,
    ),
    "B031": _fault(
        "pages are taken to lie side by side, and don't",
        ("layout.canary", "layout.bytes", "ops.elements"),
        "layout.canary[kv_write/fp8_ds_mla+fp32]",
        kv_write=pages_side_by_side,
    ),
    "B032": _fault(
        "an empty group gets a scale that is NaN",
        ("bytes.quantize",),
        "bytes.quantize[quantize/nvfp4+fp32]",
        quantize=After(placeholder_scale),
    ),
    "B034": _fault(
        "experts' scales are read at an offset of padded rows",
        ("ops.elements", "ops.structure"),
        "ops.structure[moe_experts/nvfp4+bf16]",
        moe_experts=Before(offset_of_experts),
    ),
    "B036": _fault(
        "the padding of block scales was never written",
        ("ops.anomalies", "ops.elements"),
        "ops.anomalies[gemm/nvfp4+bf16]",
        gemm=padding_of_scales,
    ),
    "B038": _fault(
        "one rule of MX scales stands for another",
        ("bytes.quantize",),
        "bytes.quantize[quantize/mxfp4+fp32]",
        quantize=Before(always_floor),
    ),
    "B040": _fault(
        "a last block that is cut has no scales of its own",
        ("ops.elements", "ops.structure"),
        "ops.elements[gemm/fp8_block+bf16]",
        gemm=Before(floor_of_blocks),
    ),
    "B044": _fault(
        "queries are scaled by a position within a part of the context",
        ("ops.elements", "stages.attn_inputs", "model.logits"),
        "ops.elements[ssmax/fp32]",
        ssmax=Before(local_position),
    ),
    "B070": _fault(
        "a part without keys has a weight",
        ("ops.merge", "model.batch"),
        "ops.merge[merge_lse/fp32]",
        merge_lse=Before(empty_part_counts),
    ),
    "B076": _fault(
        "a router row of NaN chooses an expert that isn't there",
        ("ops.router",),
        "ops.router[router/fp32]",
        router=After(sentinel),
    ),
    "B120": _fault(
        "the log of the sum of exponentials is in base 2",
        ("ops.lse", "ops.merge"),
        f"ops.lse[{_SPARSE}]",
        sparse_mla=After(base_two),
    ),
    "B126": _fault(
        "a number of heads goes through a wrong path",
        ("ops.elements", "ops.structure"),
        f"ops.structure[{_SPARSE}]",
        sparse_mla=folded_heads,
    ),
}
"""Every fault of an op or a layout that one process can show."""

LATER: Mapping[str, str] = {
    "B118": "positions of a selection looked up in a rank's own table: context parallelism",
}
"""Those of parts that core doesn't have yet."""

WHOLE: Mapping[str, str] = {
    "B007": "a later chunk scores its own keys alone",
    "B013": "a layer without an index takes another than the last owner's",
    "B025": "a short prompt beside long ones takes a path that knows another row",
    "B029": "what was cached is read wrongly in the next turn",
    "B042": "YaRN's magnitude is lost or doubled",
    "B046": "layers that read another's rows have memory of their own",
    "B048": "only some of the caches are counted",
    "B056": "prefixes are shared between salts",
    "B058": "drawn drafts are judged as certain ones",
    "B060": "tokens of accepted drafts don't count for penalties",
    "B064": "log probabilities come from another row of the window",
    "B066": "later places of a draft block are wired wrongly",
    "B068": "a request that resumes is another one",
    "B072": "idle rows spoil live ones",
    "B074": "parts of a step share scratch memory",
    "B108": "a lost worker goes unnoticed",
}
"""Faults of models and engines that checks guard against, too."""
