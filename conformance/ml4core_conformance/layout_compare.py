"""Rows and pages of a layout beside those of the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core_conformance import compare
from ml4core_conformance.cache_inputs import SCALE, SOFTMAX, block_table, int32, tie_free
from ml4core_conformance.case import Arguments, Pages
from ml4core_conformance.check import CheckFailed
from ml4core_conformance.draw import Draw
from ml4core_conformance.layout_bench import Bench
from ml4core_conformance.oracle import oracle
from ml4core_conformance.oracle.expected import Float
from ml4core_conformance.oracle.layouts import KEY, ByteLayout
from ml4core_conformance.placement import on_cpu
from ml4core_conformance.subject import Subject
from ml4core_conformance.tolerances import tolerance


def some_rows(
    draw: Draw, count: int, layout: ByteLayout, dtype: torch.dtype, finite: bool = False
) -> Tensor:
    """fp32 [count, width], exact in ``dtype``: of many sizes, and one of zeros; unless ``finite``,
    infinities and NaN in one row.
    """
    rows = draw.normal(count, layout.width) * torch.exp2(draw.integers(count, 1, low=-6, high=7))
    if layout.role == "latent":
        rows = tie_free(rows.to(dtype).float(), layout.id)
    if count > 2:
        rows[0] = 0
        if not finite:
            rows[1, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    return rows.to(dtype).float()


def equal_rows(found: Tensor, want: Tensor, slots: Tensor, where: str) -> None:
    """Raises ``CheckFailed`` unless rows [n, width] are the same fp32 numbers. Any NaN is NaN."""
    due, got = want.float(), found.float()
    if got.shape != due.shape:
        raise CheckFailed(f"rows are {list(got.shape)}, wanted {list(due.shape)}; {where}")
    wrong = ~((got == due) | (got.isnan() & due.isnan()))
    if wrong.any():
        row, value = (int(i) for i in wrong.nonzero()[0])
        raise CheckFailed(
            f"{int(wrong.sum())} of {wrong.numel()} values differ, first at slot "
            f"{int(slots[row])}, value {value}: found {float(got[row, value]):.9g}, wanted is "
            f"{float(due[row, value]):.9g}; {where}"
        )


def equal_bytes(layout: ByteLayout, size: int, found: Tensor, want: Tensor, where: str) -> None:
    """Raises ``CheckFailed`` unless pages uint8 [blocks, bytes of a page] are the same."""
    if found.shape != want.shape:
        raise CheckFailed(f"pages are {list(found.shape)}, wanted {list(want.shape)} {where}")
    wrong = (found != want).nonzero()
    if len(wrong):
        page, byte = (int(i) for i in wrong[0])
        place = token_place(layout, size, page, byte)
        raise CheckFailed(
            f"{len(wrong)} bytes differ {where}, first byte {byte} of page {page} ({place}): found "
            f"0x{int(found[page, byte]):02x}, wanted is 0x{int(want[page, byte]):02x}"
        )


def token_place(layout: ByteLayout, size: int, page: int, byte: int) -> str:
    """Whose a byte of a page is, in words."""
    token, own = (torch.tensor(layout.offsets(size)) == byte).nonzero()[0].tolist()
    return f"slot {page * size + token}, its byte {own} of {layout.token_bytes}"


def read_by_score(subject: Subject, bench: Bench, pages: Tensor, draw: Draw) -> None:
    """The backend's attention, or its index scores, over pages uint8 [blocks, bytes of a page] that
    the oracle wrote.
    """
    layout, size = bench.known, bench.block_size
    scale = torch.tensor([SCALE]) if layout.scaled else None
    cache = Pages(layout.id, size, (layout.array(pages, size),), scale, 1, bench.layout.role)
    arguments: Arguments
    if layout.role == "latent":
        op = "sparse_mla"
        slots = torch.stack([draw.permutation(pages.shape[0] * size)[:12] for _ in range(2)])
        arguments = {
            "q": draw.normal(2, 8, layout.width, dtype=bench.dtype),
            "cache": cache,
            "slots": slots.to(torch.int32),
            "lens": int32([12, 5]),
            "scale": SOFTMAX,
        }
    else:
        op = "indexer_logits"
        columns = pages.shape[0] - 1
        arguments = {
            "q": draw.normal(2, 32, KEY, dtype=bench.dtype),
            "weights": draw.normal(2, 32),
            "scale": KEY**-0.5 * 32**-0.5,
            "cache": cache,
            "block_table": block_table(draw, [columns], columns, pages.shape[0]),
            "query_start": int32([0, 2]),
            "visible": int32([columns * size - 1, columns * size]),
            "max_rows": 2,
        }
    given = {
        name: value.to(bench.device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    given["cache"] = bench.holding(pages)
    found = bench.ops[op](*given.values())
    results = dict(
        zip(("out", "lse") if op == "sparse_mla" else ("scores",), _all(found), strict=True)
    )
    want = oracle(op)({}, arguments).results
    where = f"{op} over pages of the oracle, {size} tokens a page"
    for name, due in want.items():
        assert isinstance(due, Float)
        compare.anomalies(name, results[name], due, where)
        bound = tolerance(op, layout.id, due.dtype)
        subject.measure(compare.elements(name, results[name], due, bound, where))


def _all(returned: object) -> list[Tensor]:
    return [on_cpu(one) for one in (returned if isinstance(returned, tuple | list) else [returned])]
