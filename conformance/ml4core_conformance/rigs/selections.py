"""The judgement of a selection by the scores that it was made from."""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import Selection
from ml4core_conformance.check import CheckFailed, Measure
from ml4core_conformance.rigs.errors import equal
from ml4core_conformance.rigs.scenes import Scene
from ml4core_conformance.subject import Subject


def check_selection(
    subject: Subject,
    scene: Scene,
    found: Selection,
    scores: Tensor,
    margin: Tensor,
    topk: int,
    where: str,
) -> None:
    """Raises ``CheckFailed`` unless each real row selects what it must.

    Args:
        scores: fp64 [T, slots] of every slot of the index cache; only visible ones count.
        margin: [T, slots]: scores nearer to the border than this may fall on either side.
    """
    positions, lens, slots = (part.cpu() for part in found[:3])
    shape = (scene.rows, topk)
    for name, got, wanted, dtype in (
        ("positions", positions, shape, torch.int32),
        ("lens", lens, shape[:1], torch.int32),
        ("slots", slots, shape, torch.int32),
        ("has_nan", found.has_nan, shape[:1], torch.bool),
    ):
        if tuple(got.shape) != wanted or got.dtype != dtype:
            form = f"{got.dtype} {list(got.shape)}"
            raise CheckFailed(f"{name}: {form}, wanted {dtype} {list(wanted)}; {where}")
    real = scene.real
    visible = scene.cpu.visible
    equal("lens", lens[real], visible[real].clamp(max=topk), where)
    packed = torch.arange(topk) < lens.unsqueeze(-1)
    if bool(((positions >= 0) != packed)[real].any()):
        raise CheckFailed(f"positions: not packed in front with -1 behind; {where}")
    inside = (positions < visible.unsqueeze(-1)) | ~packed
    if not bool(inside[real].all()):
        raise CheckFailed(f"positions: a key that the row can't see was selected; {where}")
    rising = (positions[:, 1:] > positions[:, :-1]) | ~packed[:, 1:]
    if not bool(rising[real].all()):
        raise CheckFailed(f"positions: not ascending, or one appears twice; {where}")
    equal("slots", slots[real], scene.positions_to_slots(positions)[real], where)
    if bool(found.has_nan.cpu()[real].any()):
        raise CheckFailed(f"has_nan: set where no score is NaN; {where}")
    _largest(subject, scene, positions, scores, margin, topk, where)


def _largest(
    subject: Subject,
    scene: Scene,
    positions: Tensor,
    scores: Tensor,
    margin: Tensor,
    topk: int,
    where: str,
) -> None:
    """The worst key left out must not beat the least one taken by more than the margins."""
    worst, row_of_worst = -torch.inf, 0
    for row in scene.real.nonzero().flatten().tolist():
        visible = int(scene.cpu.visible[row])
        if visible <= topk:
            continue
        every = torch.arange(visible, dtype=torch.int32).expand(scene.rows, -1)
        at = scene.positions_to_slots(every, "index")[row].long()
        mine, slack = scores[row, at], margin[row, at]
        taken = torch.zeros(visible, dtype=torch.bool)
        taken[positions[row].long()] = True
        least = mine[taken].min()
        gap = mine[~taken] - least - slack[~taken] - slack[taken].max()
        if float(gap.max()) > worst:
            worst, row_of_worst = float(gap.max()), row
    if worst > -torch.inf:
        at_row = f"{where}, row {row_of_worst}"
        subject.measure(
            Measure("score left out beyond the least taken", max(worst, 0.0), 0.0, at_row)
        )
