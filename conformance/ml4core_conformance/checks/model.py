"""The whole tiny model against fp64: however its rows are cut into steps, wherever its pages lie,
whoever shares a step with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ml4core.api import StepPlan, Weight
from ml4core_conformance import tiny
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.oracle.stages import EXACT
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.passes import FLOOR, Case, case_of, oracle_of, run_steps
from ml4core_conformance.rigs.plans import Padding, PageBook, make_plan
from ml4core_conformance.rigs.rig import BF16, DEFAULT, FP8, MIXED, REFERENCE, Precision, Rig
from ml4core_conformance.subject import Subject

PRECISIONS = (REFERENCE, DEFAULT, BF16, FP8, MIXED)


def checks() -> list[Check]:
    runs: dict[str, tuple[Callable[[Case], None], str, tuple[str, ...]]] = {
        "model.logits": (
            logits,
            "Logits of every row of a prompt, computed in one step, are those of the model in "
            "fp64; a layer that is rotated and should not be fails here, or the other way about.",
            ("B042", "B044"),
        ),
        "model.chunks": (
            chunks,
            "A prompt cut into chunks of any size, its last tokens as decodes or verify windows, "
            "has the logits of the whole.",
            ("B007", "B025", "B029"),
        ),
        "model.batch": (
            batch,
            "Requests of unlike lengths that share steps, with padding, each have the logits that "
            "they have alone.",
            ("B070", "B072", "B074"),
        ),
        "model.pages": (
            pages,
            "Where a request's pages lie changes nothing, stale content of a page neither.",
            ("B020",),
        ),
    }
    found = [
        Check(
            family,
            "model",
            partial(_each_seed, run, precision),
            doc,
            variant=precision.name,
            requires=precision.requires,
            unit=f"model/{precision.name}",
            bugs=bugs,
        )
        for precision in PRECISIONS
        for family, (run, doc, bugs) in runs.items()
    ]
    for family, alone, words, doc in (
        (
            "model.kv_bytes",
            kv_bytes,
            frozenset[str](),
            "Caches take the bytes of the layers that own them and no more; each owner's rows are "
            "its own, and a layer that reads another's writes none.",
        ),
        (
            "model.index_share",
            index_share,
            frozenset[str](),
            "A layer without an indexer of its own uses the selection of the nearest owner before "
            "it, not another's.",
        ),
        (
            "model.fault",
            fault,
            frozenset[str](),
            "A NaN in a real row's logits or index scores is reported with the step, and nothing "
            "else is.",
        ),
        (
            "model.invariant",
            invariant,
            frozenset({"feature:batch_invariant"}),
            "A request has the same bits of logits alone and in a batch.",
        ),
    ):
        found.append(
            Check(
                family,
                "model",
                partial(_each_seed, alone, REFERENCE),
                doc,
                requires=REFERENCE.requires | words,
                unit="model/reference",
                bugs=("B013", "B027", "B046") if family.startswith("model.k") else (),
            )
        )
    return found


def _each_seed(run: Callable[[Case], None], precision: Precision, subject: Subject) -> None:
    for seed in subject.seeds:
        run(case_of(subject, precision, seed))


def logits(case: Case) -> None:
    for padding in (Padding(), Padding(requests=3, rows=len(case.ids) + 7, pages=5)):
        request = case.rig.book().request(case.ids, case.rig.block_size)
        got = run_steps(case.rig, request, [len(case.ids)], padding=padding)
        case.judge(f"one step, padding {padding.rows}", got, request)


def chunks(case: Case) -> None:
    rig, ids, size = case.rig, case.ids, case.rig.block_size
    for name, sizes, window, padding in (
        ("chunks", [2, 5, size - 7, 3, 17], 0, Padding()),
        ("decodes", [size - 3, *[1] * 9], 0, Padding(requests=2)),
        ("windows of 3", [size - 4, 3, 3, 3], 3, Padding(requests=2)),
        ("windows of 5", [size - 2, 5, 5], 5, Padding()),
    ):
        request = rig.book().request(ids, size)
        got = run_steps(rig, request, sizes, window, padding)
        case.judge(name, got, request)


def batch(case: Case) -> None:
    """Four requests that hold beginnings of the prompt, step by step side by side."""
    rig, size, book = case.rig, case.rig.block_size, case.rig.book()
    requests = [book.request(case.ids, size) for _ in range(3)]
    short = book.request(case.ids[:9], size)
    got: dict[int, list[Tensor]] = {number: [] for number in range(4)}
    every = [*requests, short]
    schedule = (
        # request -> rows; decodes first, then a window, then chunks by length
        [(3, 4), (0, size - 5), (1, size + 1)],
        [(1, 1), (0, 3), (3, 5), (2, size)],
        [(1, 1), (2, 1), (0, 3)],
        [(1, 1), (2, 1), (0, 1)],
    )
    for number, rows_of in enumerate(schedule):
        work = [(every[who], rows) for who, rows in rows_of]
        total = sum(rows for _, rows in rows_of) + 6
        plan = make_plan(
            work,
            size,
            verify_rows=3,
            padding=Padding(requests=5, rows=total if number < 2 else 0, pages=3),
            device=rig.device,
        )
        output = rig.step(plan).logits
        for (who, rows), part in zip(
            rows_of, output.split([rows for _, rows in rows_of]), strict=True
        ):
            got[who].append(part)
            every[who].computed += rows
    for who, parts in got.items():
        case.judge(f"request {who} of a batch", torch.cat(parts), every[who])


def pages(case: Case) -> None:
    rig = case.rig
    for stride in (5, 11):
        rig.fill(stride)
        book = PageBook(rig.blocks, stride=stride)
        book.request(case.ids[:5], rig.block_size)  # so that others are left
        request = book.request(case.ids, rig.block_size)
        got = run_steps(rig, request, [rig.block_size - 1, len(case.ids) - rig.block_size + 1])
        case.judge(f"pages {request.pages['latent']}", got, request)


def invariant(case: Case) -> None:
    rig, size, book = case.rig, case.rig.block_size, case.rig.book()
    alone = run_steps(rig, book.request(case.ids, size), [size, 1, 1])
    request, other = book.request(case.ids, size), book.request(case.ids[::-1], size)
    mixed = []
    for work in ([(other, 7), (request, size)], [(request, 1), (other, 7)], [(request, 1)]):
        plan = make_plan(work, size, padding=Padding(requests=3), device=rig.device)
        output = rig.step(plan).logits.split([rows for _, rows in work])
        for (who, rows), part in zip(work, output, strict=True):
            who.computed += rows
            if who is request:
                mixed.append(part)
    together = torch.cat(mixed)
    if not torch.equal(alone, together):
        row = int((alone != together).any(-1).nonzero()[0])
        raise CheckFailed(f"logits of row {row} have other bits in a batch than alone")


def kv_bytes(case: Case) -> None:
    rig = case.rig
    for group, owners, want in (
        ("latent", rig.kv.latent, tiny.KV_OWNERS),
        ("index", rig.kv.index_keys, tiny.INDEX_OWNERS),
    ):
        if tuple(owners) != want:
            raise CheckFailed(f"{group} caches are owned by {tuple(owners)}, wanted {want}")
        due = rig.blocks * rig.block_size * rig.layouts[group].bytes_per_token
        for layer, cache in owners.items():
            held = sum(part.untyped_storage().nbytes() for part in cache.parts)
            if cache.nbytes != due or held > due + due // 4:
                raise CheckFailed(
                    f"the {group} cache of layer {layer} has {cache.nbytes} bytes in {held} bytes "
                    f"of memory; {rig.blocks} pages of {rig.block_size} tokens take {due}"
                )
    request = rig.book().request(case.ids, rig.block_size)
    before = rig.snapshot()
    run_steps(rig, request, [len(case.ids) - 1, 1])
    for group, caches, exact, twin in (
        ("latent", rig.kv.latent, case.exact.rows, case.twin.rows),
        ("index", rig.kv.index_keys, case.exact.keys, case.twin.keys),
    ):
        slots = request.slots(group, rig.block_size)
        for layer, cache in caches.items():
            where = f"{group} rows of layer {layer}"
            pair = (exact[layer], twin[layer])
            errors.judge(
                case.subject, "stored rows", rig.rows(cache)[slots], *pair, where, floor=FLOOR
            )
    written = {
        (group, layer): request.slots(group, rig.block_size) for group, layer, _ in rig.caches()
    }
    rig.untouched(before, written, "two steps of one request")


def index_share(case: Case) -> None:
    rig = case.rig
    found = {layer.index: layer.topk_source for layer in rig.spec.layers}
    if found != tiny.SOURCES:
        raise CheckFailed(f"layers use the selections of {found}, wanted {tiny.SOURCES}")
    request = rig.book().request(case.ids, rig.block_size)
    got = run_steps(rig, request, [len(case.ids)])
    case.judge("with the nearest owner before", got, request)
    # What another owner's selection would do, lest this passes for want of a difference.
    earlier = {
        layer: max((one for one in tiny.INDEX_OWNERS if one < source), default=0)
        for layer, source in tiny.SOURCES.items()
        if layer != source
    }
    wrong = oracle_of(rig, EXACT, earlier).run(case.ids).logits
    gap = float(errors.row_errors(wrong, case.exact.logits).median())
    if gap < 100 * FLOOR:
        raise RuntimeError(f"selections of other owners move logits by {gap:.2g} only")


def fault(case: Case) -> None:
    rig, size = case.rig, case.rig.block_size
    good = rig.step(_plan(rig, [case.ids[:6]]))
    if bool(good.fault):
        raise CheckFailed("a step without NaN reports a fault")
    embedding = rig.prepared.top["embedding"]
    table = embedding.data if isinstance(embedding, Weight) else embedding
    token = 5
    held = table[token].clone()
    table[token] = torch.nan
    try:
        clean = [id for id in case.ids[:size] if id not in (0, token)][:6]
        padded = rig.step(_plan(rig, [clean], Padding(requests=3, rows=14)))
        if bool(padded.fault):
            raise CheckFailed("a step of which no real row holds NaN reports a fault")
        bad = rig.step(_plan(rig, [clean, [*clean[:2], token]]))
        if not bool(bad.fault):
            raise CheckFailed("a row holds NaN, and the step reports no fault")
    finally:
        table[token] = held


def _plan(rig: Rig, prompts: Sequence[list[int]], padding: Padding = Padding()) -> StepPlan:  # noqa: B008
    book = rig.book()
    work = [(book.request(ids, rig.block_size), len(ids)) for ids in prompts]
    work.sort(key=lambda item: item[1])
    return make_plan(work, rig.block_size, padding=padding, device=rig.device)
