"""What would make a plan fit: values, each of which was planned with and does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.planning import parallel
from ml4core.planning.model import PlannedModel
from ml4core.planning.plan import Plan, PlanOptions, make_plan
from ml4core.planning.variants import VARIANTS

MAX_UTILIZATION = 0.95
_TENTH = 2**30 // 10


@dataclass(frozen=True)
class Proposal:
    """One change by which the plan fits, all else as it was.

    Attributes:
        flag: as on the command line.
        value: what to give it.
        plan: the plan with it.
    """

    flag: str
    value: str
    plan: Plan

    def __str__(self) -> str:
        return f"{self.flag} {self.value}"


def propose(plan: Plan) -> list[Proposal]:
    """Changes that work, each by itself. Empty if the plan fits, or if none does."""
    if plan.fits:
        return []
    return [
        found
        for search in (_length, _sequences, _rows, _cache, _context_ranks, _ranks, _format)
        if (found := search(plan)) is not None
    ] + list(_memory(plan))


def _try(plan: Plan, **changes: Any) -> Plan | None:
    """The plan with other flags (``model`` and ``options`` too); None if it doesn't fit."""
    model: PlannedModel = changes.pop("model", plan.model)
    options: PlanOptions = changes.pop("options", plan.options)
    try:
        args: EngineArgs = replace(plan.args, **changes)
        tried = make_plan(model, args, options)
    except ArgumentsError:
        return None
    return tried if tried.fits else None


def _largest(limit: int, fitting: Callable[[int], Plan | None]) -> tuple[int, Plan] | None:
    """The largest of 1 .. limit that fits, where all below it do too."""
    low, best = 0, None
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        found = fitting(middle)
        if found is None:
            high = middle - 1
        else:
            low, best = middle, found
    return (low, best) if best is not None else None


def _length(plan: Plan) -> Proposal | None:
    step = plan.block_size * plan.ranks.dcp
    found = _largest((plan.max_model_len - 1) // step, lambda n: _try(plan, max_model_len=n * step))
    return None if found is None else Proposal("--max-model-len", str(found[0] * step), found[1])


def _sequences(plan: Plan) -> Proposal | None:
    found = _largest(plan.max_num_seqs - 1, lambda n: _try(plan, max_num_seqs=n))
    return None if found is None else Proposal("--max-num-seqs", str(found[0]), found[1])


def _rows(plan: Plan) -> Proposal | None:
    at_least = plan.max_num_seqs
    for rows in (4096, 2048, 1024, 512):
        if at_least <= rows < plan.rows:
            changes = {"max_num_batched_tokens": rows, "max_num_seqs": at_least}
            if (found := _try(plan, **changes)) is not None:
                return Proposal("--max-num-batched-tokens", str(rows), found)
    return None


def _cache(plan: Plan) -> Proposal | None:
    if plan.args.kv_cache_memory_bytes is not None:
        found = _try(plan, kv_cache_memory_bytes=plan.needed.nbytes)
        if found is not None:
            return Proposal("--kv-cache-memory-bytes", str(plan.needed.nbytes), found)
    if plan.layout in ("bf16", "fp32"):
        found = _try(plan, kv_cache_dtype="fp8")
        return Proposal("--kv-cache-dtype", "fp8", found) if found is not None else None
    return None


def _context_ranks(plan: Plan) -> Proposal | None:
    ranks = plan.ranks
    sizes = [n for n in range(ranks.dcp + 1, ranks.tp * ranks.pcp + 1) if ranks.tp % n == 0]
    for dcp in sizes:
        found = _try(plan, decode_context_parallel_size=dcp)
        if found is not None:
            return Proposal("--decode-context-parallel-size", str(dcp), found)
    return None


def _ranks(plan: Plan) -> Proposal | None:
    sizes = parallel.valid_tensor_sizes(
        plan.ranks, plan.model.spec, plan.model.table, plan.held, plan.ranks.dcp
    )
    for tp in sizes:
        if tp > plan.ranks.tp and (found := _try(plan, tensor_parallel_size=tp)) is not None:
            return Proposal("--tensor-parallel-size", str(tp), found)
    return None


def _format(plan: Plan) -> Proposal | None:
    """The largest form of the checkpoint that fits."""
    if plan.model.variant is None:
        return None
    sizes = {}
    for variant in VARIANTS:
        if variant != plan.model.variant:
            tried = _try(plan, model=plan.model.as_variant(variant))
            if tried is not None:
                sizes[variant] = tried
    if sizes:
        best = max(sizes, key=lambda variant: sizes[variant].weight_bytes)
        return Proposal("--weights", best, sizes[best])
    shorter = {}  # with less to a request, too
    for variant in VARIANTS:
        model = plan.model.as_variant(variant)
        if (found := _length(make_plan(model, plan.args, plan.options))) is not None:
            shorter[variant] = found
    if not shorter:
        return None
    best = max(shorter, key=lambda variant: shorter[variant].plan.max_model_len)
    return Proposal("--weights", f"{best} {shorter[best]}", shorter[best].plan)


def _memory(plan: Plan) -> Iterator[Proposal]:
    """More of the device, and a larger device."""
    assert plan.options.memory is not None or plan.usable is None
    if plan.options.memory is None:
        return
    share = math.ceil(100 * plan.required / plan.options.memory) / 100
    if plan.args.gpu_memory_utilization < share <= MAX_UTILIZATION:
        found = _try(plan, gpu_memory_utilization=share)
        if found is not None:
            yield Proposal("--gpu-memory-utilization", f"{share:g}", found)
    tenths = math.ceil(plan.required / plan.args.gpu_memory_utilization / _TENTH)
    for extra in range(3):  # what is rounded away may cost a tenth
        text = f"{(tenths + extra) / 10:.1f}"
        options = replace(plan.options, memory=int(float(text) * 2**30))
        if (found := _try(plan, options=options)) is not None:
            yield Proposal("--memory", text, found)
            return
