"""Judges draws by their distribution: Pearson's chi-square test."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core_conformance.check import CheckFailed, Measure
from ml4core_conformance.tolerances import ALPHA

_LEAST = 5.0
"""Cells of fewer expected draws are joined: the test's law holds for larger ones only."""


def chi_square(
    name: str, cells: Tensor, probabilities: Tensor, outcomes: tuple[str, ...], where: str
) -> Measure:
    """The surprise -log10(p) of draws ``cells`` int64 [draws], against that of ``ALPHA``.

    ``CheckFailed`` where a cell that has no probability was drawn, or one that doesn't exist.
    """
    count = probabilities.numel()
    outside = (cells < 0) | (cells >= count)
    if outside.any():
        draw = int(outside.nonzero()[0])
        raise CheckFailed(f"{name}: draw {draw} at {where} is none of the outcomes {outcomes[:8]}")
    seen = torch.bincount(cells, minlength=count).to(torch.float64)
    impossible = (probabilities == 0) & (seen > 0)
    if impossible.any():
        cell = int(impossible.nonzero()[0])
        raise CheckFailed(
            f"{name}: outcome {outcomes[cell]!r} has no probability and was drawn "
            f"{int(seen[cell])} times of {cells.numel()} at {where}"
        )
    expected = probabilities.to(torch.float64) * cells.numel()
    seen, expected, order = _joined(seen, expected)
    if len(expected) < 2:
        return Measure(f"{name} law", 0.0, _surprise(ALPHA), where)
    terms = (seen - expected) ** 2 / expected
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    p = float(torch.special.gammaincc(freedom, terms.sum() / 2))
    worst = int(terms.argmax())
    place = (
        f"{where}, {cells.numel()} draws, worst at {_label(outcomes, order, worst)}: seen "
        f"{int(seen[worst])}, expected {float(expected[worst]):.1f}"
    )
    return Measure(f"{name} law, -log10(p)", _surprise(p), _surprise(ALPHA), place)


def _surprise(p: float) -> float:
    return -float(torch.log10(torch.tensor(max(p, 1e-300), dtype=torch.float64)))


def _joined(seen: Tensor, expected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Counts with the rare cells joined in order until each group is expected often enough, behind
    those that stand alone; and the cells that do. Neighbours are alike: runs of tokens that begin
    with the same ones.
    """
    rare = expected < _LEAST
    order = (~rare).nonzero().flatten()
    counts, due = seen[order].tolist(), expected[order].tolist()
    group = [0.0, 0.0]
    for cell in rare.nonzero().flatten().tolist():
        group = [group[0] + float(seen[cell]), group[1] + float(expected[cell])]
        if group[1] >= _LEAST:
            counts.append(group[0])
            due.append(group[1])
            group = [0.0, 0.0]
    if due and group[1] > 0:  # what is left is too little: to the rarest of the others
        least = due.index(min(due))
        counts[least] += group[0]
        due[least] += group[1]
    return torch.tensor(counts, dtype=seen.dtype), torch.tensor(due, dtype=expected.dtype), order


def _label(outcomes: tuple[str, ...], order: Tensor, cell: int) -> str:
    return outcomes[int(order[cell])] if cell < len(order) else "rare ones together"
