"""The backend within a system: what it refuses and how, who else is installed, where it computes,
how it stops, and that nothing is left behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ml4core import registry
from ml4core.api import Weight
from ml4core_conformance import tiny
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.draw import Draw
from ml4core_conformance.rigs import neighbours
from ml4core_conformance.rigs.child import ChildFailed, ask
from ml4core_conformance.rigs.plans import Padding, make_plan
from ml4core_conformance.rigs.rig import DEFAULT, Rig
from ml4core_conformance.rigs.watch import Seen, watched
from ml4core_conformance.subject import Subject

_PLANNED_FLOATS, _PLANNED = 16, 1024
"""Values that the host may make for itself in a step: a few numbers, and lists of sizes."""


def checks() -> list[Check]:
    rows: tuple[tuple[str, str, Any, str, tuple[str, ...]], ...] = (
        (
            "system.isolation",
            "report",
            isolation_report,
            "Broken plugins beside it, one that hangs, one that dies, two of one name, one too "
            "new, each get a line with their reason; the backend's own line is as before.",
            (),
        ),
        (
            "system.isolation",
            "serve",
            isolation_serve,
            "With broken plugins installed beside it the backend probes and opens, and imports "
            "none of them.",
            (),
        ),
        (
            "system.device_honesty",
            "",
            device_honesty,
            "Weights, caches and results lie on the declared device, and a step's arithmetic runs "
            "there: by torch's word, and by the backend's harness, if it counts kernels.",
            (),
        ),
        (
            "system.close",
            "",
            close,
            "A session may be closed twice, and what another session computes doesn't change.",
            (),
        ),
    )
    return [
        Check(
            family,
            "system",
            run,
            doc,
            variant=variant,
            unit=f"{family}/{variant}",
            timeout_s=180.0,
            bugs=bugs,
        )
        for family, variant, run, doc, bugs in rows
    ]


# Neighbours


def isolation_report(subject: Subject) -> None:
    with neighbours.installed():
        records = [
            record
            for record in registry.discover()
            if record.distribution.startswith("ml4-") or record == subject.record
        ]
        quick = [record for record in records if record.name != "hangs"]
        lines = registry.report(records=quick)
        # One that hangs costs what it is given, so it gets little.
        slow = [record for record in records if record.name == "hangs"]
        lines += registry.report(records=slow, timeout=2.0)
    for neighbour in neighbours.NEIGHBOURS:
        mine = [line for line in lines if line.record.name == neighbour.name]
        if not mine:
            raise CheckFailed(f"the plugin {neighbour.name!r} is not in the report")
        for line in mine:
            reasons = "; ".join(map(str, line.result.refusals))
            if line.result.state != neighbour.state or neighbour.says not in reasons:
                raise CheckFailed(
                    f"the plugin {neighbour.name!r} is called {line.result.state}: {reasons}; "
                    f"wanted is {neighbour.state}, and {neighbour.says!r}"
                )
    if subject.record is not None:
        own = next(line for line in lines if line.record == subject.record)
        if own.result.state != "ok":
            reasons = "; ".join(map(str, own.result.refusals))
            raise CheckFailed(f"beside broken plugins it is called {own.result.state}: {reasons}")
    if strangers := [name for name in sys.modules if name.startswith(neighbours.PREFIX)]:
        raise CheckFailed(f"a report imports the plugins {', '.join(strangers)}")


def isolation_serve(subject: Subject) -> None:
    with neighbours.installed() as folder:
        try:
            found = ask(
                "serve",
                subject.backend,
                limit_s=60.0,
                path=[str(folder)],
                deployment=subject.deployment(tiny.model(layers=4)),
            )
        except ChildFailed as failure:
            raise CheckFailed(f"beside broken plugins: {failure}") from None
    strangers = [name for name in found["modules"] if name.startswith(neighbours.PREFIX)]
    if strangers:
        raise CheckFailed(f"serving imports other plugins: {', '.join(strangers)}")


# Devices


def device_honesty(subject: Subject) -> None:
    kind = subject.torch_device.type
    spec = tiny.model()
    dtype = getattr(torch, DEFAULT.settled(subject)["dtype"])
    rig = Rig(subject, spec, tiny.weights(spec, 0, dtype), DEFAULT)
    for group, owner, cache in rig.caches():
        _on(kind, f"the {group} cache of layer {owner}", cache.parts)
    for number, weights in enumerate((rig.prepared.top, *rig.prepared.layers)):
        name = "weights outside of the layers" if number == 0 else f"weights of layer {number - 1}"
        _on(kind, name, _tensors(weights))
    ids = Draw(0, "devices").integers(rig.block_size + 5, high=spec.vocab_size).tolist()
    request = rig.book().request(ids, rig.block_size)
    launches = getattr(subject.harness, "launches", None)
    for rows in (rig.block_size + 4, 1):
        plan = make_plan([(request, rows)], rig.block_size, padding=Padding(), device=rig.device)
        request.computed += rows
        step = rig.bound(plan)[1]
        before = launches(rig.session) if launches else 0
        with torch.inference_mode():
            output, watch = watched(partial(step, rig.prepared, plan, rig.kv))
        if launches and launches(rig.session) <= before:
            raise CheckFailed("a step starts no kernel on the device, as the harness counts them")
        _on(kind, "the result of a step", (output.logits, output.fault, *output.taps))
        astray = [op for op in watch.seen if _elsewhere(op, kind)]
        if astray:
            worst = max(astray, key=lambda op: sum(count for _, count, _ in op.outputs))
            raise CheckFailed(
                f"{len(astray)} of {len(watch.seen)} ops of a step compute elsewhere than on the "
                f"declared {kind!r}, the largest being {worst.name} on "
                f"{sorted({device for device, _, _ in worst.outputs})}"
            )


def _elsewhere(op: Seen, kind: str) -> bool:
    """Whether an op makes more than what a host plans with, and not on the device."""
    return any(
        device != kind and count > (_PLANNED_FLOATS if floating else _PLANNED)
        for device, count, floating in op.outputs
    )


def _on(kind: str, what: str, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.device.type != kind:
            raise CheckFailed(f"{what}: on {tensor.device.type!r}, declared is {kind!r}")


def _tensors(weights: Mapping[str, Tensor | Weight]) -> Iterator[Tensor]:
    for value in weights.values():
        yield from value.parts.values() if isinstance(value, Weight) else (value,)


# Ends


def close(subject: Subject) -> None:
    spec = tiny.model(layers=4)
    dtype = getattr(torch, DEFAULT.settled(subject)["dtype"])
    dense = tiny.weights(spec, 0, dtype)
    kept, gone = (Rig(subject, spec, dense, DEFAULT, blocks=4) for _ in range(2))
    ids = Draw(0, "close").integers(9, high=spec.vocab_size).tolist()

    def logits() -> Tensor:
        request = kept.book().request(ids, kept.block_size)
        return kept.step(make_plan([(request, 9)], kept.block_size, device=kept.device)).logits

    before = logits()
    for attempt in ("once", "twice"):
        try:
            gone.session.close()
        except Exception as error:
            raise CheckFailed(
                f"close() called {attempt} raises {registry.describe(error)}"
            ) from None
    after = logits()
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-3):
        raise CheckFailed("closing one session changes what another one computes")
