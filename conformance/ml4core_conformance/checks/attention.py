"""Attention and selection beyond their numbers: what lse means, how parts join, which keys are
chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ml4core_conformance import compare
from ml4core_conformance.case import Arguments, OpCase
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.evaluation import Caller, Evaluation, caller_of, result
from ml4core_conformance.op_checks import op_check, variants
from ml4core_conformance.oracle import oracle
from ml4core_conformance.oracle.expected import Exact, Expected, Float, Selected
from ml4core_conformance.selection import selected
from ml4core_conformance.subject import Subject
from ml4core_conformance.tolerances import EPS, tolerance

_SPLIT = frozenset({"lengths", "placed", "empty", "peaked", "hostile"})
"""Cases whose keys are divided over ranks."""
_LN2 = math.log(2.0)


def checks() -> list[Check]:
    found = []
    for op, _, cases in variants(("sparse_mla", "window_mla")):
        found.append(op_check("ops.lse", cases, _lse, _lse.__doc__ or ""))
        split = [case for case in cases if case.name in _SPLIT]
        if op == "sparse_mla":
            needs = frozenset({"op:merge_lse"})
            doc = _split.__doc__ or ""
            found.append(op_check("ops.merge", split, _split, doc, requires=needs))
    for _, _, cases in variants(("merge_lse",)):
        found.append(op_check("ops.merge", cases, _order, _order.__doc__ or ""))
    for _, _, cases in variants(("topk",)):
        found.append(op_check("ops.topk", cases, _topk, _topk.__doc__ or ""))
    return found


def _lse(subject: Subject, evaluation: Evaluation) -> bool:
    """lse is the natural logarithm of the sum of exponentials. A row without keys has lse -inf and
    out 0. A failure spoils every join of partial attention: another base weighs ranks wrongly, and
    a rank without keys counts as one that has some.
    """
    out, lse = result(evaluation, "out"), result(evaluation, "lse")
    want = evaluation.expected.results["lse"]
    assert isinstance(want, Float)
    empty = torch.isneginf(want.value)
    for name, wrong, due in (
        ("lse", empty & ~torch.isneginf(lse), "-inf"),
        ("out", (empty.unsqueeze(-1) & (out != 0)).any(-1), "0"),
    ):
        if wrong.any():
            at = int(wrong.flatten().nonzero()[0])
            place = compare.place_of(at, wrong.shape, want.axes)
            found = lse.flatten()[at] if name == "lse" else out.flatten(0, 1)[at].abs().max()
            raise CheckFailed(
                f"{name} of a row without keys is {float(found):.6g}, wanted is {due}, at "
                f"{evaluation.where}, {place}"
            )
    compare.anomalies("lse", lse, want, evaluation.where)
    bound = tolerance(evaluation.case.op, evaluation.case.variant, want.dtype)
    measure = compare.elements("lse", lse, want, bound, evaluation.where)
    if measure.error > measure.bound and _is_base_two(lse, want.value):
        measure = replace(measure, what="lse elements (in base 2; wanted is base e)")
    subject.measure(measure)
    return True


def _is_base_two(lse: Tensor, want: Tensor) -> bool:
    finite = torch.isfinite(want) & torch.isfinite(lse)
    return torch.allclose(lse[finite].double() * _LN2, want[finite], rtol=1e-3, atol=1e-3)


def _order(subject: Subject, evaluation: Evaluation) -> bool:
    """Joined parts are the attention over all keys, in whatever order the parts come, and a part
    without keys leaves no trace. A failure is an error on some rank layouts only.
    """
    case, before = evaluation.case, evaluation.before
    caller = caller_of(subject, case)
    parts = before["outs"].shape[0]
    for shift in sorted({0, 1, parts - 1}):
        order = [(part + shift) % parts for part in reversed(range(parts))]
        moved = {name: value[order].contiguous() for name, value in before.items()}
        where = f"{evaluation.where}, parts in order {order}"
        _judge(subject, case, caller.results(moved), evaluation.expected, where)
    return True


def _split(subject: Subject, evaluation: Evaluation) -> bool:
    """Keys divided over ranks, some of which get none, attended apart and joined by lse give what
    all keys give at once. A failure is an error of decode context parallelism.
    """
    case, before = evaluation.case, evaluation.before
    attend, merge = caller_of(subject, case), Caller(subject, "merge_lse", case.requires)
    for name, owners in _divisions(before["slots"]):
        parts = [_share(before, owners == rank) for rank in range(int(owners.max()) + 1)]
        found = [attend.results(part) for part in parts]
        joined = {
            "outs": torch.stack([one["out"] for one in found]),
            "lses": torch.stack([one["lse"] for one in found]),
        }
        each = [oracle(case.op)(case.options, part) for part in parts]
        where = f"{evaluation.where}, keys divided {name}"
        want = _joined(evaluation.expected, each)
        _judge(subject, case, merge.results(joined), want, where)
    return True


def _divisions(slots: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Who has which column [k] of the slots."""
    column = torch.arange(slots.shape[1])
    yield "by parity over 2 ranks", column % 2
    yield "in 3 runs, the middle one empty", torch.where(column < len(column) // 3, 0, 2)
    yield "over 8 ranks, 4 columns at a time", column // 4 % 8
    yield "all to the last of 2 ranks", torch.ones_like(column)


def _share(arguments: Arguments, mine: Tensor) -> Arguments:
    """The arguments with -1 for the keys of other ranks."""
    return {**arguments, "slots": torch.where(mine, arguments["slots"], -1)}


def _joined(whole: Expected, parts: list[Expected]) -> Expected:
    """The whole, and what may be lost as each part is rounded on its own."""
    out, lse = whole.results["out"], whole.results["lse"]
    assert isinstance(out, Float)
    assert isinstance(lse, Float)
    size, slack = torch.zeros_like(out.value), torch.zeros_like(out.value)
    lse_size = lse.size.clone()
    for part in parts:
        own, own_lse = part.results["out"], part.results["lse"]
        assert isinstance(own, Float)
        assert isinstance(own_lse, Float)
        empty = torch.isneginf(own_lse.value)
        weight = torch.where(empty, 0.0, torch.exp(own_lse.value - lse.value)).unsqueeze(-1)
        size += weight * (own.size + own.value.abs() * (1 + own_lse.size.unsqueeze(-1)))
        slack += weight * own.value.abs() * EPS[out.dtype] / 2
        slack += weight * (0.0 if own.slack is None else own.slack)
        lse_size += weight.squeeze(-1) * own_lse.size
    return Expected(
        {"out": replace(out, size=size, slack=slack), "lse": replace(lse, size=lse_size)}
    )


def _judge(
    subject: Subject, case: OpCase, found: dict[str, Tensor], want: Expected, where: str
) -> None:
    for name, due in want.results.items():
        assert isinstance(due, Float)
        compare.anomalies(f"joined {name}", found[name], due, where)
        bound = tolerance("merge_lse", case.variant, due.dtype)
        subject.measure(compare.elements(f"joined {name}", found[name], due, bound, where))


def _topk(subject: Subject, evaluation: Evaluation) -> bool:
    """Chosen positions are those of the largest scores: visible, unique, in ascending order, packed
    in front, ties to the lowest position; NaN is never chosen, and is told. A failure reads wild
    keys, drops the best ones, or differs between backends.
    """
    want = evaluation.expected.results
    due = want["positions"]
    assert isinstance(due, Selected)
    result(evaluation, "positions")  # of the contract's form
    for results in (evaluation.results, evaluation.again):
        positions, lens = results["positions"], results["lens"]
        selected("positions", positions, due, evaluation.where)
        count = (positions != -1).sum(-1)
        if not torch.equal(count, lens.to(count.dtype)):
            row = int((count != lens).nonzero()[0])
            raise CheckFailed(
                f"lens of row {row} is {int(lens[row])}, and {int(count[row])} positions were "
                f"chosen, at {evaluation.where}"
            )
        for name in ("lens", "has_nan"):
            exact = want[name]
            assert isinstance(exact, Exact)
            compare.exact(name, results[name], exact, evaluation.where)
    return True
