"""Judges what was chosen by score: reachable, unique, packed, ordered, and the best."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ml4core_conformance.check import CheckFailed
from ml4core_conformance.oracle.expected import Selected


def selected(name: str, found: Tensor, want: Selected, where: str) -> None:
    """Raises ``CheckFailed`` at the first row that breaks a rule of ``Selected``."""
    scores = want.scores.to(torch.float64)
    margin = want.margin.to(torch.float64).expand(found.shape[0])
    for row in range(found.shape[0]):
        problem = _row(
            [int(i) for i in found[row]],
            [int(i) for i in want.value[row]],
            scores[row],
            int(want.visible[row]),
            float(margin[row]),
            want.ordered,
        )
        if problem:
            raise CheckFailed(f"{name}: {problem} at {where}, {want.axes[0]} {row}")


def _row(
    found: list[int], want: list[int], scores: Tensor, visible: int, margin: float, ordered: str
) -> str:
    """What is wrong with one row; empty if nothing is."""
    chosen = [i for i in found if i != -1]
    due = [i for i in want if i != -1]
    if found[len(chosen) :] != [-1] * (len(found) - len(chosen)):
        return f"it is not packed in front: -1 stands before {chosen[-1]}"
    outside = [i for i in chosen if not 0 <= i < min(visible, len(scores))]
    if outside:
        return f"{outside[0]} was chosen, and there are {visible} candidates"
    if len(set(chosen)) != len(chosen):
        twice = next(i for i in chosen if chosen.count(i) > 1)
        return f"{twice} was chosen twice"
    broken = [i for i in chosen if torch.isnan(scores[i])]
    if broken:
        return f"{broken[0]} was chosen, whose score is NaN"
    if len(chosen) != len(due):
        return f"{len(chosen)} were chosen; wanted are {len(due)}"
    if set(chosen) != set(due):
        extra, lost = sorted(set(chosen) - set(due)), sorted(set(due) - set(chosen))
        a, b = (torch.sort(scores[ids], descending=True).values for ids in (chosen, due))
        gap = float(torch.where(a == b, 0.0, (a - b).abs()).max())  # inf - inf would be NaN
        if margin == 0 or not gap <= margin:
            return (
                f"{extra[0]} of score {float(scores[extra[0]]):.9g} was chosen and {lost[0]} of "
                f"{float(scores[lost[0]]):.9g} was not; {len(lost)} differ, "
                f"and what is nearer than {margin:.3g} may"
            )
    return _order(chosen, due, scores, margin, ordered)


def _order(chosen: list[int], due: list[int], scores: Tensor, margin: float, ordered: str) -> str:
    if ordered == "position" and chosen != sorted(chosen):
        return f"it is not in ascending order of position: {_first_descent(chosen)}"
    if ordered == "score":
        if margin == 0:
            wrong = next(
                (i for i, (a, b) in enumerate(zip(chosen, due, strict=True)) if a != b), -1
            )
            if wrong >= 0:
                return f"rank {wrong} is {chosen[wrong]}; wanted is {due[wrong]}"
        values = scores[chosen]
        rise = (values[1:] - values[:-1] > margin).nonzero()
        if len(rise):
            rank = int(rise[0])
            return (
                f"it is not in descending order of score: {chosen[rank]}, then {chosen[rank + 1]}"
            )
    return ""


def _first_descent(chosen: list[int]) -> str:
    for a, b in pairwise(chosen):
        if b < a:
            return f"{a}, then {b}"
    return ""
