"""What the checks of stages, models and systems are made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ml4core.api import Capabilities, Deployment, Device, Probe, Selection, Session
from ml4core.cpu.backend import CpuBackend
from ml4core.models.layer_table import build_model_spec
from ml4core.registry import discover
from ml4core_conformance import tiny
from ml4core_conformance.check import CheckFailed
from ml4core_conformance.checks.stages import rig_of
from ml4core_conformance.mutants import mutants
from ml4core_conformance.rigs import errors, neighbours
from ml4core_conformance.rigs.child import ChildFailed, ask
from ml4core_conformance.rigs.plans import Padding, PageBook, make_plan
from ml4core_conformance.rigs.rig import REFERENCE
from ml4core_conformance.rigs.scenes import Scene
from ml4core_conformance.rigs.selections import check_selection
from ml4core_conformance.rigs.served import smooth
from ml4core_conformance.rigs.watch import watched
from ml4core_conformance.subject import Subject

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def subject() -> Subject:
    backend = CpuBackend()
    return Subject(backend, backend.probe().devices[0])


class Awkward:
    """A backend that hangs, dies or raises in its probe."""

    name, priority = "awkward", 1

    def __init__(self, how: str) -> None:
        self.how = how

    def probe(self) -> Probe:
        if self.how == "hangs":
            time.sleep(60)
        if self.how == "dies":
            import os

            os._exit(7)
        raise RuntimeError("no luck")

    def capabilities(self, device: Device) -> Capabilities:
        raise NotImplementedError

    def open(self, deployment: Deployment) -> Session:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("how", "says"),
    [("hangs", "no answer within"), ("dies", "ended with 7"), ("raises", "no luck")],
)
def test_a_child_says_what_became_of_it(
    how: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))  # where the child finds this module
    with pytest.raises(ChildFailed, match=says):
        ask("probe", Awkward(how), limit_s=4.0 if how == "hangs" else 60.0)


def test_neighbours_are_found_and_go_away() -> None:
    with neighbours.installed():
        found = {r.name: r for r in discover() if r.distribution.startswith("ml4-")}
        assert set(found) == {"breaks", "hangs", "dies", "twin", "newer", "silent"}
        refused = {name for name, record in found.items() if record.refusals}
        assert refused == {"twin", "newer", "silent"}
    assert not [r for r in discover() if r.distribution.startswith("ml4-")]


def test_plans_pad_without_a_trace() -> None:
    book = PageBook(12)
    one, two, three = (book.request(range(length), 4) for length in (9, 6, 5))
    one.computed, two.computed = 8, 3
    plan = make_plan(
        [(one, 1), (two, 3), (three, 5)],
        4,
        verify_rows=3,
        padding=Padding(requests=3, rows=9, pages=4),
    )
    shape = plan.shape
    assert (shape.decode.rows, shape.verify.rows, shape.prefill.rows) == (1, 3, 9)
    assert plan.query_start.tolist() == [0, 1, 4, 9, 9, 9]
    assert plan.visible.tolist() == [9, 4, 5, 6, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert plan.slots["latent"][9:].tolist() == [-1] * 4
    assert plan.slots["latent"][0] == one.pages["latent"][2] * 4
    assert all(table.shape == (5, 4) for table in plan.block_tables.values())
    assert 0 not in one.pages["latent"] + two.pages["index"]


def test_a_row_that_is_off_is_named() -> None:
    backend = CpuBackend()
    subject = Subject(backend, backend.probe().devices[0])
    exact = torch.randn(4, 3, 8, dtype=torch.float64)
    got = exact.clone()
    errors.judge(subject, "out", got, exact, exact, "here", ("row", "head"))
    got[2, 1] *= 1.01
    with pytest.raises(CheckFailed, match="row 2, head 1"):
        errors.judge(subject, "out", got, exact, exact, "here", ("row", "head"))
    got[2, 1] = torch.nan
    with pytest.raises(CheckFailed, match="inf"):
        errors.judge(subject, "out", got, exact, exact, "here", ("row", "head"))


def _weakest_dropped(found: Selection, row: int, scores: torch.Tensor) -> Selection:
    positions = found.positions.clone()
    held = set(positions[row].tolist())
    other = next(p for p in range(positions.shape[1] + 4) if p not in held)
    positions[row] = torch.tensor(sorted([*positions[row, 1:].tolist(), other]))
    return found._replace(positions=positions)


def _twice(found: Selection, row: int, scores: torch.Tensor) -> Selection:
    positions = found.positions.clone()
    positions[row, 1] = positions[row, 0]
    return found._replace(positions=positions)


def _unseen(found: Selection, row: int, scores: torch.Tensor) -> Selection:
    positions = found.positions.clone()
    positions[row, -1] = 10_000
    return found._replace(positions=positions)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_weakest_dropped, "score left out|slots"),
        (_twice, "appears twice"),
        (_unseen, "can't see"),
    ],
)
def test_wrong_selections_are_caught(
    subject: Subject, spoil: Callable[..., Selection], says: str
) -> None:
    rig = rig_of(subject, REFERENCE, 0)
    scene = Scene(rig, "decode", 0)
    topk = tiny.CONFIG.topk
    scores = torch.rand(scene.rows, rig.blocks * rig.block_size, dtype=torch.float64)
    positions = torch.full((scene.rows, topk), -1, dtype=torch.int32)
    for row in scene.real.nonzero().flatten().tolist():
        visible = int(scene.cpu.visible[row])
        every = torch.arange(visible, dtype=torch.int32).expand(scene.rows, -1)
        mine = scores[row, scene.positions_to_slots(every, "index")[row].long()]
        best = mine.topk(min(topk, visible)).indices.sort().values
        positions[row, : len(best)] = best.to(torch.int32)
    lens = scene.cpu.visible.clamp(max=topk).to(torch.int32)
    none = torch.zeros(scene.rows, dtype=torch.bool)
    right = Selection(positions, lens, scene.positions_to_slots(positions), none)
    margin = torch.zeros_like(scores)
    check_selection(subject, scene, right, scores, margin, topk, "here")
    wrong = spoil(right, 0, scores)
    if wrong.positions.max() < 10_000:
        wrong = wrong._replace(slots=scene.positions_to_slots(wrong.positions))
    with pytest.raises(CheckFailed, match=says):
        check_selection(subject, scene, wrong, scores, margin, topk, "here")


def test_a_wait_of_the_host_is_seen() -> None:
    x = torch.ones(3)
    for call in (lambda: x.sum().item(), lambda: x[x > 0], lambda: bool(x[0] > 0)):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                _, watch = watched(call)
            assert any(op.waits for op in watch.seen)
    _, watch = watched(lambda: torch.where(x > 0, x, 0.0) @ x)
    assert not any(op.waits for op in watch.seen)


def test_models_of_interpreted_engines_are_smaller_and_have_layers_of_each_kind(
    subject: Subject,
) -> None:
    interpreted = replace(subject, device=replace(subject.device, kind="interpreted"))
    whole, small = (
        build_model_spec(replace(tiny.CONFIG, **smooth(one)).params()).layers
        for one in (subject, interpreted)
    )
    assert (len(whole), len(small)) == (8, 4)
    for layers in (whole, small):
        assert {layer.rope is None for layer in layers} == {True, False}
        assert {layer.moe is None for layer in layers} == {True, False}
        assert {layer.indexer is None for layer in layers} == {True, False}


def test_a_storage_that_an_op_takes_is_not_read_byte_by_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As interpreted kernels share their arguments' memory, for which that took minutes."""

    def read(*_: object) -> int:
        raise AssertionError("a byte of a storage is read")

    monkeypatch.setattr(torch.UntypedStorage, "__getitem__", read)
    x, view = torch.ones(8), torch.empty(0)
    _, watch = watched(lambda: view.set_(x.untyped_storage(), 0, (8,), (1,)))
    assert [op.outputs for op in watch.seen] == [(("cpu", 8, True),)]


def test_each_family_has_a_mutant() -> None:
    from ml4core_conformance.catalog import all_checks

    mine = ("stages.", "model.", "system.", "plugin.", "perf.")
    families = {
        check.family
        for check in all_checks()
        if check.family.startswith(mine) and not check.provisional
    }
    named = {entry.partition("[")[0] for mutant in mutants() for entry in mutant.dies_at}
    assert families <= named
