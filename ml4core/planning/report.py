"""A plan as JSON-able data, for whoever prints it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ml4core.planning.parts import CUT_WORDS, PARTS
from ml4core.planning.plan import Plan
from ml4core.planning.proposals import Proposal

LADDER = (8192, 32768, 131072, 262144, 524288, 1048576)
"""Contexts for which requests are counted."""


def to_json(plan: Plan, proposals: Iterable[Proposal], contexts: Sequence[int]) -> dict[str, Any]:
    """Bytes everywhere, unless a key says otherwise. ``contexts`` beside those of ``LADDER``."""
    ranks, spec = plan.ranks, plan.model.spec
    return {
        "model": plan.model.name,
        "variant": plan.model.variant,
        "held": "decoded" if plan.options.decoded else "kept",
        "dtype": plan.dtype,
        "ranks": {
            "world": ranks.world,
            "tensor_parallel_size": ranks.tp,
            "data_parallel_size": ranks.dp,
            "decode_context_parallel_size": ranks.dcp,
            "prefill_context_parallel_size": ranks.pcp,
            "expert_parallel_size": ranks.ep,
        },
        "limits": {
            "max_model_len": plan.max_model_len,
            "max_num_seqs": plan.max_num_seqs,
            "max_num_batched_tokens": plan.rows,
            "block_size": plan.block_size,
        },
        "weights": {
            "rank": plan.weight_bytes,
            "checkpoint": plan.model.table.stored,
            "checkpoint_formats": dict(plan.model.table.formats()),
            "parts": [_part(plan, part) for part in PARTS if part in plan.model.table.parts],
        },
        "kv": {
            "layout": plan.layout,
            "bytes_per_token": dict(plan.row_bytes),
            "groups": [_group(plan, index) for index in range(len(plan.groups))],
        },
        "reserve": {
            "bytes": plan.reserve.nbytes,
            "terms": dict(plan.reserve.terms),
            "formulas": dict(plan.reserve.formulas),
        },
        "memory": {
            "device": plan.options.memory,
            "gpu_memory_utilization": plan.args.gpu_memory_utilization,
            "usable": plan.usable,
            "required": plan.required,
            "for_caches": plan.budget,
        },
        "capacity": _capacity(plan, contexts),
        "fits": plan.fits if plan.budget is not None else None,
        "shortfall": plan.shortfall,
        "works": [{"flag": one.flag, "value": one.value} for one in proposals],
        "notes": list(_notes(plan)),
        "assumptions": dict(spec.assumptions),
    }


def _part(plan: Plan, part: str) -> dict[str, Any]:
    loaded = plan.weights.get(part)
    return {
        "part": part,
        "loaded": loaded is not None,
        "checkpoint": plan.not_loaded[part] if loaded is None else loaded.stored,
        "held": 0 if loaded is None else loaded.held,
        "rank": 0 if loaded is None else loaded.rank,
        "shared": _cut(plan, part),
    }


def _cut(plan: Plan, part: str) -> str:
    ranks = plan.ranks
    if part != "routed experts":
        return CUT_WORDS[part]
    if ranks.expert_parallel:
        return f"whole experts over {ranks.world} ranks"
    return f"by width over {ranks.world} ranks" if ranks.world > ranks.tp else "by width over TP"


def _group(plan: Plan, index: int) -> dict[str, Any]:
    group = plan.groups[index]
    pools, needed = plan.pools, plan.needed
    slack = plan.step_rows if group.window is not None else 0
    each = group.pages(plan.max_model_len, plan.block_size, plan.ranks.dcp, plan.step_rows)
    return {
        "group": group.name,
        "layers": len(group.owners),
        "layout": group.layout.id,
        "row": group.layout.bytes_per_token,
        "bytes_per_token": group.bytes_per_token,
        "page": group.page_bytes(plan.block_size),
        "window": group.window,
        "rows_beside_window": slack,
        "pages_a_request": each,
        "pages": None if pools is None else pools.blocks[group.name],
        "bytes": None if pools is None else pools.bytes_of(group),
        "bytes_needed": needed.bytes_of(group),
        "shared": "over DCP" if group.sharded else "on every rank",
    }


def _capacity(plan: Plan, contexts: Sequence[int]) -> dict[str, Any] | None:
    pools = plan.pools
    if pools is None:
        return None
    ladder = {length for length in LADDER if length < plan.max_model_len}
    lengths = sorted(ladder | {plan.max_model_len, *contexts})
    return {
        "tokens": pools.tokens,
        "tokens_all_replicas": pools.tokens * plan.ranks.dp,
        "longest_context": plan.longest_context,
        "pool_bytes": pools.nbytes,
        "tokens_by_layout": {name: plan.tokens_at(name) for name in plan.row_bytes},
        "requests": [
            {"context": length, "requests": min(pools.requests(length), plan.max_num_seqs)}
            for length in lengths
        ],
    }


def _notes(plan: Plan) -> Iterable[str]:
    args, ranks = plan.args, plan.ranks
    if plan.options.memory is None and args.kv_cache_memory_bytes is None:
        yield "no memory is known, so no pool is planned; `ml4 plan` takes --memory and --device"
    if args.kv_transfer_config:
        yield "--kv-transfer-config: rows on the host, and hot rows on the device, are not counted"
    if args.quantization is not None:
        yield f"--quantization {args.quantization}: not counted; --weights plans another form"
    if ranks.pcp > 1 and ranks.dcp == 1:
        yield "prefill context parallel ranks hold the same cache; DCP would share it out"
    if "drafter" in plan.not_loaded:
        yield "the drafter is not loaded without --speculative-config"
    if "vision" in plan.not_loaded:
        yield "the encoder of images is not loaded without --limit-mm-per-prompt"
    if ranks.dp > 1:
        yield f"tokens are those of one replica; there are {ranks.dp}"
