"""Drafting and verifying are pure functions of fixed shapes, and are bound as any other stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from ml4core.api import STAGES, Accepted, DraftPlan, Refusal, Rejected, Sampling, Segment, StepShape
from ml4core.compose.bind import bind_global_stage
from ml4core.compose.verify import verify_and_sample

from .rig import Rig, context_of, draft_of

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

HOST = {"item", "_local_scalar_dense", "nonzero", "unique", "masked_select"}
NONE = Segment(0, 0, 0)
SHAPE = StepShape(NONE, Segment(2, 6, 3), NONE, (("draft", 8),), 6)


class Call(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


def export(call: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    with torch.no_grad():
        exported = torch.export.export(Call(call), args, strict=False)
    names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert not {name.split(".")[1] for name in names if name.count(".") == 2} & HOST
    return exported.module()


def clone(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def case(rig: Rig, lengths: tuple[int, ...], rows: int, temperature: float) -> tuple[Any, ...]:
    """Requests whose last `rows` rows are to be stored, half of them rejects; and padding."""
    requests = rig.requests(*lengths)
    for request in requests:
        request.temperature = temperature
        request.length -= rows // 2
        request.stored = 0
        rig.run([request], draft=False)
        request.length += rows // 2
    plan, taps = rig.plan(requests, rejects=rows - rows // 2, pad_rows=3, pad_requests=1, pages=8)
    return plan, taps


@pytest.mark.parametrize("mode", ["row", "block"])
def test_an_exported_draft_gives_the_same(mode: str) -> None:
    rig = Rig(draft_of(layers=2, depth=2, window_mode=mode))
    first = case(rig, (9, 4, 20), 4, 0.0)
    run = export(rig.call, (rig.weights, first[0], clone(rig.caches), first[1]))
    # Other lengths, temperatures and rejects, same shape: nothing of the first was baked in.
    for plan, taps in (first, case(rig, (3, 26, 6), 4, 0.9)):
        assert isinstance(plan, DraftPlan)
        theirs = clone(rig.caches)
        got = run(rig.weights, plan, theirs, taps)
        want = rig.call(rig.weights, plan, rig.caches, taps)
        assert torch.equal(got.ids, want.ids)
        torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)
        for ours, other in zip(rig.caches, theirs, strict=True):
            torch.testing.assert_close(ours.parts[0], other.parts[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("drafts", ["none", "certain", "drawn"])
def test_an_exported_verification_gives_the_same(drafts: str) -> None:
    call = verify_and_sample(context_of(None), {})

    def args(seed: int) -> tuple[Any, ...]:
        g = torch.Generator().manual_seed(seed)
        sampling = Sampling(
            torch.tensor([0.0, 0.9, 1.5]),
            torch.randint(0, 1 << 40, (3,), generator=g),
            torch.randint(0, 1 << 20, (3,), generator=g),
        )
        rows = 1 if drafts == "none" else 4
        made: list[Any] = [torch.randn(3 * rows, 11, generator=g), sampling]
        if drafts != "none":
            made.append(torch.randint(-1, 11, (3, 3), generator=g))
        if drafts == "drawn":
            made.append(torch.randn(3, 3, 11, generator=g))
        return tuple(made)

    run = export(call, args(1))
    for seed in (1, 2, 3):
        got, want = run(*args(seed)), call(*args(seed))
        assert torch.equal(got[0], want.ids)
        assert torch.equal(got[1], want.counts)


class Providers:
    """What of a session binding asks for."""

    def __init__(self, *candidates: Any) -> None:
        self.candidates = candidates
        self.asked: list[tuple[Any, ...]] = []

    def providers(self, *args: Any) -> tuple[Any, ...]:
        self.asked.append(args)
        return self.candidates


@pytest.mark.parametrize("stage", ["draft_block", "verify_and_sample"])
def test_core_composes_what_nobody_offers(stage: str) -> None:
    no = Rejected("fused", (Refusal("fused", "depth", "knows depth 7 only", "depth 7"),))
    session: Any = Providers(no)
    call, choice = bind_global_stage(stage, session, context_of(draft_of()), SHAPE)
    assert callable(call)
    assert session.asked == [(stage, None, SHAPE)]
    assert (choice.part, choice.provider, choice.chosen_by) == (stage, "compose", "core")
    assert choice.rejected == (no,)
    assert not STAGES[stage].per_layer


@pytest.mark.parametrize("stage", ["draft_block", "verify_and_sample"])
def test_a_backend_replaces_the_whole_stage(stage: str) -> None:
    def fused(*args: Any) -> None:
        return None

    session: Any = Providers(Accepted("fused", fused, "7"))
    call, choice = bind_global_stage(stage, session, context_of(draft_of()), SHAPE)
    assert call is fused
    assert (choice.provider, choice.chosen_by, choice.version) == ("fused", "backend", "7")
