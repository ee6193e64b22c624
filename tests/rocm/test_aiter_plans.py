"""Plans of AITER's sparse decoding over the layers and steps of a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache, LayerKV, Selection
from ml4core_rocm import aiter_functions

from .fake_aiter import Fake
from .tape import Tape
from .test_aiter_mla import attended, draw, far, latents

TOPK, ROWS, LAYERS = 20, 3, 3
PLANNED, DECODED = "get_mla_metadata_v1", "mla_decode_fwd"

Step = Callable[[Tensor, Selection], list[Tensor]]


def selection(visible: list[int], random: torch.Generator) -> Selection:
    """Of rows that see so many keys, of which each has the ``TOPK`` best, or all."""
    lens = torch.tensor(visible, dtype=torch.int32).clamp(max=TOPK)
    slots = torch.stack([torch.randperm(96, generator=random)[:TOPK] for _ in visible]).int()
    slots = torch.where(torch.arange(TOPK) < lens[:, None], slots, -1)
    return Selection(slots, lens, slots, torch.zeros(len(visible), dtype=torch.bool))


def session(cache: KVCache) -> Step:
    """A step of all layers, each with its own cache object over the same rows."""
    from ml4core_rocm.kernels.aiter_mla import StepPlans, stage

    shared = StepPlans()
    layer: Any = type("Layer", (), {"softmax_scale": 0.04})()
    bound = [
        (stage(layer, shared), LayerKV(dataclasses.replace(cache), None)) for _ in range(LAYERS)
    ]

    def step(q: Tensor, chosen: Selection) -> list[Tensor]:
        plan = object()
        return [call(plan, kv, q, chosen)[0] for call, kv in bound]

    return step


def check(outs: list[Tensor], q: Tensor, cache: KVCache, chosen: Selection) -> None:
    for out in outs:
        for t, count in enumerate(chosen.lens.tolist()):
            if count:
                want = attended(q[t], cache, chosen.slots[t, :count], 0.04)[0]
                assert far(out[t], want) < (4e-3 if cache.layout.id == "bf16" else 4e-2)
            else:
                assert not out[t].any()


def planned(aiter: Fake) -> Iterator[list[Any]]:
    """What each planning call was given of lengths, and the works that it listed."""
    for call in aiter.calls:
        if call.name == PLANNED:
            given = call.given
            works = int(given["work_indptr"][-1])
            yield [given["seqlens_kv_indptr"].tolist(), given["work_info_set"][:works].tolist()]


def test_a_step_is_planned_once_for_its_own_lengths(aiter: Fake) -> None:
    """Whether they change, stay, or grow beyond top-k; the last two make the plan of before."""
    random = draw(1)
    cache = latents("bf16", 6, random)
    step = session(cache)
    q = torch.randn(ROWS, 16, 576, generator=random).bfloat16()
    steps = ([20, 9, 30], [20, 9, 30], [21, 9, 31], [21, 10, 31], [0, 10, 31], [9, 20, 20])
    for done, visible in enumerate(steps):
        chosen = selection(visible, random)
        check(step(q, chosen), q, cache, chosen)
        assert aiter.names().count(PLANNED) == done + 1
        assert aiter.names().count(DECODED) == LAYERS * (done + 1)
    first, same, beyond, grown, empty, other = planned(aiter)
    assert first == same == beyond
    assert first[0] == [0, 20, 29, 49]
    assert len({str(one) for one in (first, grown, empty, other)}) == 4


@pytest.mark.parametrize("layout", ["e4m3", "bf16"])
def test_a_replay_plans_for_the_lengths_of_then(
    aiter: Fake, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """The plan is in the graph, into arrays of its own, and nothing in it waits for the device."""
    from ml4core_rocm.kernels import aiter_mla

    random = draw(2)
    cache = latents(layout, 6, random)
    step, tape = session(cache), Tape()

    def load(name: str) -> Callable[..., Any]:
        found = aiter_functions.load(name)
        return tape.queued(found) if name in (PLANNED, DECODED) else found

    monkeypatch.setattr(aiter_mla, "load", load)
    held = selection([20, 9, 30], random)
    q = torch.randn(ROWS, 16, 576, generator=random).bfloat16()
    with tape:
        outs = step(q, held)
    assert aiter.names().count(PLANNED) == 1
    # An eager step between, with lengths of its own.
    between = selection([3, 3], random)
    monkeypatch.setattr(aiter_mla, "load", aiter_functions.load)
    check(step(q[:2], between), q[:2], cache, between)
    aiter.calls.clear()
    for done, visible in enumerate(([20, 10, 31], [1, 0, 7], [40, 40, 40])):
        chosen = selection(visible, random)
        for name in ("slots", "lens"):
            getattr(held, name).copy_(getattr(chosen, name))
        q.copy_(torch.randn(q.shape, generator=random))
        tape.replay()
        check(outs, q, cache, chosen)
        assert aiter.names().count(PLANNED) == done + 1
    arrays = [call.given["work_info_set"] for call in aiter.calls if call.name == PLANNED]
    assert len({one.data_ptr() for one in arrays}) == 1


def test_the_tape_tells_of_a_wait() -> None:
    with Tape(), pytest.raises(AssertionError, match="waits for the device"):
        int(torch.ones(2).sum())
