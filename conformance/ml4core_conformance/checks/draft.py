"""The stage ``draft_block`` against the drafter in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    DraftOutput,
    DraftPlan,
    DraftWeights,
    KVCache,
    Sampling,
    Segment,
    StepShape,
)
from ml4core.api.known_layouts import latent_layout
from ml4core_conformance import tiny
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.draft import DraftOracle
from ml4core_conformance.oracle.stages import EXACT
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.passes import is_coarse
from ml4core_conformance.rigs.plans import NO_ROWS
from ml4core_conformance.rigs.rig import BF16, MIXED, REFERENCE, Precision, Rig, through
from ml4core_conformance.rigs.scenes import global_stage
from ml4core_conformance.subject import Subject

DRAFTERS: dict[str, dict[str, Any]] = {
    "row": {},
    "block": {"window_mode": "block", "anchor_vector": "add", "mask_rows": 3},
    "unlimited": {"window": None, "normed_head_input": False, "depth": 1, "mask_rows": 1},
}


def checks() -> list[Check]:
    return [
        Check(
            "stages.draft_block",
            "model",
            partial(draft_block, name, precision),
            "Context rows, the block's rows and the drafts' logits are those of the drafter in "
            "fp64, for requests of unlike lengths; rejected and padded rows leave no trace.",
            variant=f"{name}/{precision.name}",
            requires=precision.requires,
            unit=f"draft/{precision.name}",
            bugs=("B066",),
        )
        for name in DRAFTERS
        for precision in (REFERENCE, BF16, MIXED)
    ]


class _Request:
    """A request that drafts: accepted tokens before position ``length``, and its pages."""

    def __init__(self, length: int, pages: list[int], draw: Draw, draft: Any, vocab: int) -> None:
        self.length = length
        self.pages = pages
        self.taps = [draw.normal(length, draft.hidden_size) for _ in draft.taps]
        self.anchor = int(draw.integers(1, high=vocab))

    def slot(self, position: int, block_size: int) -> int:
        return self.pages[position // block_size] * block_size + position % block_size


def draft_block(name: str, precision: Precision, subject: Subject) -> None:
    for seed in subject.seeds:
        spec = tiny.drafter(tiny.model(), **DRAFTERS[name])
        dtype = getattr(torch, precision.settled(subject)["dtype"])
        dense = tiny.weights(spec, seed, dtype)
        rig = Rig(subject, spec, dense, precision, blocks=2)
        _judge_drafter(subject, rig, tiny.draft_weights(spec, seed, dtype, dense.top), seed)


def _judge_drafter(subject: Subject, rig: Rig, dense: DraftWeights, seed: int) -> None:
    draft = rig.spec.draft
    assert draft is not None
    own = {n: w for n, w in dense.top.items() if n not in ("embedding", "output")}
    shared = {n: rig.prepared.top[n] for n in ("embedding", "output")}
    prepare = rig.session.prepare_weights
    prepared = DraftWeights(
        {**prepare(own, None, "draft"), **shared},
        tuple(
            prepare(dict(w), layer, "draft")
            for layer, w in zip(draft.layers, dense.layers, strict=True)
        ),
    )
    size, draw = rig.block_size, Draw(seed, "drafts")
    requests = [
        _Request(size + 20, [4, 2], draw, draft, rig.spec.vocab_size),
        _Request(5, [6], draw, draft, rig.spec.vocab_size),
    ]
    layout = latent_layout(rig.deployment.kv_layout)
    twin = DraftOracle(draft, dense, rig.rounding)
    exact = DraftOracle(draft, dense, EXACT)
    for label, call in _drafters(rig, len(requests), size):
        caches = [rig.session.alloc_kv(layout, 8, size) for _ in draft.layers]
        everything = set(range(8 * size))
        with torch.inference_mode():
            # First all but two tokens of each, then the rest with rejected and padded rows.
            plan, taps = _plan(rig, requests, [(0, r.length - 2) for r in requests], [])
            call(prepared, plan, caches, taps)
            spans = [(r.length - 2, r.length) for r in requests]
            plan, taps = _plan(rig, requests, spans, requests, rejected=2)
            before = [rig.tokens(cache) for cache in caches]
            output: DraftOutput = call(prepared, plan, caches, taps)
        written = set()
        for number, request in enumerate(requests):
            where = f"drafter {draft.window_mode}, request {number}, by {label}"
            _judge_request(subject, rig, request, number, (exact, twin), caches, output, where)
            block = range(request.length - 2, request.length + draft.depth)
            written |= {request.slot(position, size) for position in block}
        quiet = torch.tensor(sorted(everything - written))
        for old, cache in zip(before, caches, strict=True):
            for a, b in zip(old, rig.tokens(cache), strict=True):
                if not torch.equal(a[quiet], b[quiet]):
                    raise CheckFailed(
                        f"draft_block wrote to a slot that is no row of its; by {label}"
                    )
        errors.finite("logits of padded requests", output.logits[len(requests) :].cpu(), label)


def _judge_request(
    subject: Subject,
    rig: Rig,
    request: _Request,
    number: int,
    oracles: tuple[DraftOracle, DraftOracle],
    caches: Sequence[KVCache],
    output: DraftOutput,
    where: str,
) -> None:
    size, draft = rig.block_size, oracles[0].spec
    positions = torch.arange(request.length)
    slots = torch.tensor([request.slot(p, size) for p in range(request.length + draft.depth)])
    stored = [rig.rows(cache)[slots] for cache in caches]
    taps = [tap.to(rig.dtype).double() for tap in request.taps]
    want, lossy = (one.context_rows(taps, positions) for one in oracles)
    coarse = is_coarse(caches[0].layout, rig.dtype)

    def judge_rows(what: str, layer: int, held: Tensor, exact: Tensor, twin: Tensor) -> None:
        place = f"{where}, {layer}"
        if coarse:
            best = through(caches[layer], exact)
            errors.stored(subject, what, held, exact, twin, best, place, errors.FLOOR)
        else:
            errors.judge(subject, what, held, exact, twin.to(rig.dtype), place)

    for layer, held in enumerate(stored):
        judge_rows("context rows", layer, held[: request.length], want[layer], lossy[layer])
    ids = output.ids[number].cpu().tolist()
    context = [held[: request.length] for held in stored]
    results = []
    for one in oracles:
        # Of a coarse cache the rows that it holds: those near the middle fall to either side.
        own = iter([held[request.length :] for held in stored])
        residual, hidden, rows = one.block(
            request.anchor,
            request.length,
            context,
            lambda x, own=own: next(own) if coarse else x.to(rig.dtype).double(),  # type: ignore[misc]
        )
        results.append((rows, one.logits(request.anchor, residual, hidden, ids)))
    (rows, logits), (lossy_rows, lossy_logits) = results
    for layer, held in enumerate(stored):
        judge_rows("block rows", layer, held[request.length :], rows[layer], lossy_rows[layer])
    got = output.logits[number].cpu()
    errors.judge(subject, "draft logits", got, logits, lossy_logits, where, ("draft",))
    if ids != got.argmax(-1).tolist():
        raise CheckFailed(
            f"drafts at temperature 0 are {ids}, not the largest of their own logits; {where}"
        )


def _plan(
    rig: Rig,
    requests: Sequence[_Request],
    spans: Sequence[tuple[int, int]],
    drafting: Sequence[_Request],
    rejected: int = 0,
) -> tuple[DraftPlan, list[Tensor]]:
    """Context rows of positions ``spans``, with rejected ones behind each and two padded ones; and
    the blocks of those that draft, with a padded request.
    """
    draft = rig.spec.draft
    assert draft is not None
    size, junk = rig.block_size, torch.full((draft.hidden_size,), 9.0)
    positions: list[int] = []
    slots: list[int] = []
    rows: list[list[Tensor]] = []
    for request, (start, stop) in zip(requests, spans, strict=True):
        for position in range(start, stop):
            positions.append(position)
            slots.append(request.slot(position, size))
            rows.append([tap[position] for tap in request.taps])
        positions += [stop + i for i in range(rejected)]
        slots += [-1] * rejected
        rows += [[junk] * len(draft.taps)] * rejected
    positions += [0, 0]
    slots += [-1, -1]
    rows += [[junk] * len(draft.taps)] * 2
    taps = [torch.stack([row[m] for row in rows]) for m in range(len(draft.taps))]
    padded = 1 if drafting else 0
    count = len(drafting) + padded
    table = torch.zeros(count, 2, dtype=torch.int32)
    block = torch.full((count, draft.depth), -1)
    for r, request in enumerate(drafting):
        for page, id in enumerate(request.pages):
            table[r, page] = id
        block[r] = torch.tensor(
            [request.slot(request.length + i, size) for i in range(draft.depth)]
        )
    lengths = [request.length for request in drafting] + [0] * padded
    sampling = Sampling(
        torch.zeros(count, dtype=torch.float32),
        torch.arange(count),
        torch.tensor(lengths, dtype=torch.int64),
    )
    plan = DraftPlan(
        torch.tensor(positions),
        torch.tensor(slots),
        torch.tensor([r.anchor for r in drafting] + [0] * padded, dtype=torch.int64),
        block,
        table,
        sampling,
    )
    tensors = {name: x.to(rig.device) for name, x in plan._asdict().items() if name != "sampling"}
    moved = plan._replace(**tensors, sampling=Sampling(*(x.to(rig.device) for x in sampling)))
    return moved, [rig.to(tap) for tap in taps]


def _drafters(rig: Rig, requests: int, size: int) -> list[tuple[str, Callable[..., Any]]]:
    draft = rig.spec.draft
    assert draft is not None
    count = requests + 1
    windows = Segment(count, count * draft.depth, draft.depth)
    rows = 2 * size
    shape = StepShape(NO_ROWS, windows, Segment(1, rows, rows), (("draft", 2),), windows.rows)
    return global_stage(rig, "draft_block", shape)
