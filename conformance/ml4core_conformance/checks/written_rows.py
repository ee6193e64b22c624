"""What the ops that write rows leave in a cache: the rows' bytes, and everything else as it was."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core_conformance.case import Pages
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.evaluation import Evaluation
from ml4core_conformance.layout_compare import token_place
from ml4core_conformance.op_checks import op_check, variants
from ml4core_conformance.oracle.layouts import byte_layout
from ml4core_conformance.subject import Subject

_OPS = ("kv_write", "indexer_write")


def checks() -> list[Check]:
    found = []
    for _, _, cases in variants(_OPS):
        for family, judge in (("layout.bytes", _bytes), ("layout.canary", _canary)):
            doc = judge.__doc__ or ""
            found.append(op_check(family, cases, judge, doc, profile="layouts"))
    return found


def _bytes(subject: Subject, evaluation: Evaluation) -> bool:
    """Each byte of a written row is the one that the layout says: codes, scales and their place. A
    failure names the byte: another rounding, scale rule, flavour or order.
    """
    for after in (evaluation.after, evaluation.after_again):
        _judge(evaluation, after["cache"], written=True)
    return True


def _canary(subject: Subject, evaluation: Evaluation) -> bool:
    """A write changes the bytes of its rows and none else: slot -1 writes nothing, and what lies
    beside a row stays. A failure corrupts someone else's cache.
    """
    for after in (evaluation.after, evaluation.after_again):
        _judge(evaluation, after["cache"], written=False)
    if evaluation.trespasses:
        raise CheckFailed(f"{'; '.join(evaluation.trespasses)} at {evaluation.where}")
    return True


def _judge(evaluation: Evaluation, after: Pages, *, written: bool) -> None:
    """Compares the bytes of the rows that were to be written, or all others."""
    layout = byte_layout(after.role, after.layout)
    size = after.block_size
    found, want = layout.pages(after.parts[0]), layout.pages(evaluation.expected.caches["cache"][0])
    wrong = (found != want) & (_mine(evaluation, want, size) == written)
    if wrong.any():
        page, byte = (int(i) for i in wrong.nonzero()[0])
        place = token_place(layout, size, page, byte)
        what = "bytes of written rows are wrong" if written else "bytes beside them were changed"
        raise CheckFailed(
            f"{int(wrong.sum())} {what}, first byte {byte} of page {page} ({place}): found "
            f"0x{int(found[page, byte]):02x}, wanted is 0x{int(want[page, byte]):02x}, at "
            f"{evaluation.where}"
        )


def _mine(evaluation: Evaluation, pages: Tensor, size: int) -> Tensor:
    """bool, as ``pages``: the bytes of the rows that were to be written."""
    cache, slots = evaluation.before["cache"], evaluation.before["slots"]
    layout = byte_layout(cache.role, cache.layout)
    marks = torch.zeros_like(pages)
    ones = torch.ones(len(slots), layout.token_bytes, dtype=torch.uint8)
    layout.put(marks, size, slots, ones)
    return marks.bool()
