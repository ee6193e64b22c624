"""What a backend declares about its speed. Times are reported; only declared facts are gates."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ml4core.api import Session, StepBuckets, StepOutput, StepPlan
from ml4core_conformance import tiny
from ml4core_conformance.check import Check, CheckFailed, Measure
from ml4core_conformance.rigs.plans import Padding, make_plan
from ml4core_conformance.rigs.rig import DEFAULT, Rig
from ml4core_conformance.rigs.watch import watched
from ml4core_conformance.subject import Subject

STEPS = 5
"""Decode steps that are looked at, after two that may compile and capture."""

TURNS = 25
"""Timed calls of each kind, of which the shortest counts."""
ROUNDS = 4
"""Of such turns at most: other load passes, a backend's own slowness stays."""
LONGEST = 1.5
"""Of the time over few slots, by that over many: equal times are no fault."""


def checks() -> list[Check]:
    return [
        Check(
            "perf.steady_state",
            "perf",
            no_sync,
            "No decode step waits for the device within the forward or has shapes that depend on "
            "data. A step that does can't be captured, and stalls the loop.",
            variant="sync",
            unit="perf",
        ),
        Check(
            "perf.steady_state",
            "perf",
            no_growth,
            "Memory on the device is the same after each decode step of one shape: nothing of a "
            "step stays behind.",
            variant="memory",
            unit="perf",
        ),
        Check(
            "perf.steady_state",
            "perf",
            captured,
            "With feature:graph_capture a decode step of a shape seen before allocates nothing on "
            "the device.",
            variant="captured",
            requires=frozenset({"feature:graph_capture"}),
            unit="perf",
        ),
        Check(
            "perf.topk_length",
            "perf",
            topk_length,
            "Attention over few of the slots that a row has room for takes no longer than over "
            "all of them. Reported: how much shorter lengths shorten it.",
            provisional=True,
            unit="perf",
        ),
    ]


class _Decoding:
    """Decode steps of three requests, padded to four, and as the engine pads."""

    def __init__(self, subject: Subject) -> None:
        spec = tiny.model()
        dtype = getattr(torch, DEFAULT.settled(subject)["dtype"])
        self.rig = rig = Rig(subject, spec, tiny.weights(spec, 0, dtype), DEFAULT)
        rig.fill(0)
        book, size = rig.book(), rig.block_size
        buckets = getattr(rig.session, "step_buckets", None) or StepBuckets()
        requests, pages = buckets.padded("decode", 4), buckets.padded("pages", 2)
        self.padding = Padding(requests=requests, pages=pages)
        self.requests = [book.request(range(size + 9), size, room=32) for _ in range(3)]
        for request in self.requests:
            request.ids += [7] * 32
            request.computed = size + 9

    def plan(self) -> StepPlan:
        plan = make_plan(
            [(request, 1) for request in self.requests],
            self.rig.block_size,
            padding=self.padding,
            device=self.rig.device,
        )
        for request in self.requests:
            request.computed += 1
        return plan

    def run(self, plan: StepPlan) -> StepOutput:
        """The step alone: nothing is copied to the host."""
        with torch.inference_mode():
            return self.rig.bound(plan)[1](self.rig.prepared, plan, self.rig.kv)


def no_sync(subject: Subject) -> None:
    decoding = _Decoding(subject)
    for _ in range(2):
        decoding.run(decoding.plan())
    waits: Counter[str] = Counter()
    for _ in range(STEPS):
        plan = decoding.plan()
        _, watch = watched(lambda plan=plan: decoding.run(plan))  # type: ignore[misc]
        waits.update(op.name for op in watch.seen if op.waits)
    if waits:
        each = ", ".join(f"{name} x{count / STEPS:g}" for name, count in waits.most_common())
        raise CheckFailed(f"in each decode step the host waits, or a shape depends on data: {each}")


def no_growth(subject: Subject) -> None:
    decoding = _Decoding(subject)
    held = []
    for _ in range(2 + STEPS):
        plan = decoding.plan()
        decoding.run(plan)
        held.append(_memory(subject))
    grown = [after - before for before, after in pairwise(held[2:])]
    if min(grown) > 0:
        raise CheckFailed(
            f"each decode step leaves {min(grown)} bytes or more behind; over {len(grown)} steps "
            f"memory grew from {held[2]} to {held[-1]} bytes"
        )


def _memory(subject: Subject) -> int:
    """Bytes in use on the device; of tensors that Python can reach where the device is the host."""
    kind = subject.torch_device.type
    if kind == "cpu":
        import gc

        gc.collect()
        spaces = {}
        for one in gc.get_objects():
            if type(one) is torch.Tensor and one.device.type == "cpu":
                storage = one.untyped_storage()
                spaces[storage.data_ptr()] = storage.nbytes()
        return sum(spaces.values())
    module = torch.get_device_module(subject.torch_device)
    module.synchronize()
    return int(module.memory_allocated())


def captured(subject: Subject) -> None:
    decoding = _Decoding(subject)
    module = torch.get_device_module(subject.torch_device)
    for _ in range(3):
        decoding.run(decoding.plan())
    plans = [decoding.plan() for _ in range(STEPS)]
    module.synchronize()
    before = module.memory_stats()["allocation.all.allocated"]
    for plan in plans:
        decoding.run(plan)
    module.synchronize()
    made = module.memory_stats()["allocation.all.allocated"] - before
    if made:
        raise CheckFailed(f"{STEPS} captured decode steps make {made} allocations on the device")


def topk_length(subject: Subject) -> None:
    decoding = _Decoding(subject)
    rig, rows, room = decoding.rig, 4, 2048
    layer = rig.spec.layers[1]
    cache = rig.kv.latent[1]
    q = rig.to(torch.randn(rows, layer.heads, layer.absorbed_dim))
    slots = torch.randint(rig.block_size, rig.blocks * rig.block_size, (rows, room))
    slots = slots.to(torch.int32).to(rig.device)

    def call(length: int) -> Callable[[], Any]:
        lens = torch.full((rows,), length, dtype=torch.int32, device=rig.device)
        return lambda: rig.ops["sparse_mla"](q, cache, slots, lens, layer.softmax_scale)

    full = short = math.inf
    for _ in range(ROUNDS):
        once = _seconds(subject, rig.session, call(room), call(room // 32))
        full, short = min(full, once[0]), min(short, once[1])
        if short < LONGEST * full:
            break
    what = "time over 64 of 2048 slots, of that over all"
    subject.measure(Measure(what, short / full, LONGEST, "sparse_mla"))


def _seconds(subject: Subject, session: Session, *calls: Callable[[], Any]) -> list[float]:
    """The shortest time of each call, in seconds: by the harness's clock, if it has one.

    The calls take turns, so that a slower spell of a shared machine falls on all of them, and
    the shortest of many stands for each, because what else runs can only add. Two turns warm up.
    """
    accelerator = subject.torch_device.type != "cpu"
    module = torch.get_device_module(subject.torch_device) if accelerator else None
    measured = getattr(subject.harness, "seconds", None)
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(2 + TURNS):
        for call, times in zip(calls, found, strict=True):
            start = time.perf_counter()
            with torch.inference_mode():
                told = measured(session, call) if measured else call()
            if module is not None:
                module.synchronize()
            times.append(float(told) if measured else time.perf_counter() - start)
    return [min(times[2:]) for times in found]
