"""Laws on a device that interprets its kernels: judged by fewer draws, which still show faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from ml4core.api import Backend
from ml4core_conformance.cases import cases_of
from ml4core_conformance.check import Check, Status, is_slow
from ml4core_conformance.distribution import chi_square
from ml4core_conformance.draw import FEW, Draw
from ml4core_conformance.judge import judge
from ml4core_conformance.mutants import mutants
from ml4core_conformance.subject import Subject


@pytest.mark.parametrize("op", ["sample", "verify_draft"])
def test_only_cases_of_a_law_have_fewer_rows(op: str) -> None:
    for case in cases_of(op, "fp32"):
        all_rows, few = (len(case.arguments(0, slow)["seeds"]) for slow in (False, True))
        if "law" in case.options:
            assert FEW <= few < all_rows, case.id
        else:
            assert few == all_rows, case.id


def interpreted(backend: Backend) -> Subject:
    """The cpu backend's device, as if it interpreted its kernels."""
    device = replace(backend.probe().devices[0], kind="interpreted")
    assert is_slow(device)
    return Subject(backend, device)


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("shared-noise", "spec.distribution[verify_draft/fp32]"),
        ("target-residual", "spec.distribution[verify_draft/fp32]"),
        ("drafts-accepted", "spec.distribution[verify_draft/fp32]"),
        ("cold-draws", "ops.sample[sample/fp32]"),
        ("noise-by-row", "ops.sample[sample/fp32]"),
    ],
)
def test_wrong_laws_die_by_few_draws(
    cpu: Backend, checks: Mapping[str, Check], name: str, id: str
) -> None:
    (mutant,) = (mutant for mutant in mutants() if mutant.name == name)
    for backend, due in ((cpu, Status.PASS), (mutant.wrap(cpu), Status.FAIL)):
        judged = interpreted(backend)
        try:
            result = judge(judged, checks[id])
        finally:
            judged.close()
        assert result.status is due, result.reason


def test_rare_outcomes_are_judged_in_groups_of_neighbours() -> None:
    """Two of 200 outcomes in a hundred draws say nothing, halves of them do."""
    odds = torch.full((200,), 1 / 200, dtype=torch.float64)
    names = tuple(map(str, range(200)))
    fair = Draw(0).integers(100, high=200)
    assert chi_square("x", fair, odds, names, "").error < 3
    lower = chi_square("x", fair // 2, odds, names, "")
    assert lower.error > lower.bound
    assert "rare ones together" in lower.where


def test_what_is_left_of_rare_outcomes_counts_too() -> None:
    odds = torch.tensor([0.5, 0.46, 0.02, 0.02], dtype=torch.float64)
    cells = torch.tensor([0] * 50 + [1] * 46 + [2] * 4)
    found = chi_square("x", cells, odds, ("a", "b", "c", "d"), "")
    assert (
        found.error < 0.5
    )  # 4 of both are expected, and are added to the rarest that stands alone
