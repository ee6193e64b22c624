"""Kernels in Triton's interpreter on the host, or compiled for the GPU where there is one.

On a GPU that is no AMD GPU the same sources are checked, not what is made of them for gfx950.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ml4core.api import OPS, Device, Weight
from ml4core.api.backend import DeviceKind
from ml4core_conformance import compare
from ml4core_conformance.case import OpCase
from ml4core_conformance.oracle import oracle
from ml4core_conformance.oracle.expected import Exact, Float, Selected
from ml4core_conformance.placement import on_cpu
from ml4core_conformance.selection import selected
from ml4core_conformance.subject import Subject
from ml4core_conformance.tolerances import tolerance

from .fake_aiter import Fake, install
from .kernels import fp8_sums

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read as triton is imported, so before any kernel is


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def aiter(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A stand-in for the library in its newest release, on gfx950."""
    return install(monkeypatch)


@pytest.fixture(scope="session")
def subjects(device: torch.device) -> Iterator[Callable[[str], Subject]]:
    """The backend on an interpreted device of an architecture; on a GPU with the sources compiled
    for that.
    """
    from ml4core_rocm.backend import RocmBackend

    kind: DeviceKind = "interpreted" if device.type == "cpu" else "source"
    made: dict[str, Subject] = {}

    def subject(arch: str) -> Subject:
        if arch not in made:
            found = Device(kind, f"{arch}, {kind}", arch, str(device))
            made[arch] = Subject(RocmBackend(), found, options={"device": kind})
        return made[arch]

    yield subject
    for one in made.values():
        one.close()


def holds(name: str, found: torch.Tensor, want: Any, case: OpCase, cuts_sums: bool = False) -> None:
    """Fails unless a result is what the oracle wants. ``cuts_sums``: see ``fp8_sums``."""
    if isinstance(want, Float):
        each = fp8_sums.allowed(want, case) if cuts_sums else want
        bound = tolerance(case.op, case.variant, want.dtype)
        compare.anomalies(name, found, want, case.id)
        for one in (
            compare.elements(name, found, each, bound, case.id),
            *compare.structure(name, found, want, bound, case.id),
            *compare.bias(name, found, want, bound, case.id),
        ):
            assert one.error <= one.bound, f"{one.what} at {one.where}"
    elif isinstance(want, Selected):
        selected(name, found, want, case.id)
    elif isinstance(want, Exact):
        compare.exact(name, found, want, case.id)


@pytest.fixture
def conforms(subjects: Callable[[str], Subject]) -> Callable[[OpCase], None]:
    """Runs a case twice, poisoned, and holds results, caches and form against the oracle."""

    def run(case: OpCase) -> None:
        arch = "gfx942" if "e4m3fnuz" in case.variant else "gfx950"
        if arch == "gfx942" and torch.cuda.is_available() and torch.version.hip is None:
            pytest.skip("this GPU has no e4m3fnuz")
        done = subjects(arch).evaluate(case, 0)
        assert (done.problems, done.changes, done.trespasses) == ((), (), ())
        for results in (done.results, done.again):
            for name, want in done.expected.results.items():
                holds(name, results[name], want, case)
        for name, parts in done.expected.caches.items():
            for after in (done.after, done.after_again):
                cache = after[name]
                compare.caches(name, cache.parts, parts, case.id, cache.block_size)

    return run


@pytest.fixture
def judged(device: torch.device) -> Callable[[Callable[..., Any], OpCase], None]:
    """Calls an op on a case, quantising inputs if that asks for it, and holds its results against
    the oracle: for what the backend's session binds only where a deployment wants it.
    """

    def run(op: Callable[..., Any], case: OpCase) -> None:
        arguments, spec = case.arguments(0), OPS[case.op]
        given = [_placed(arguments.get(arg.name), device) for arg in spec.args]
        while given and given[-1] is None:
            given.pop()
        named = {"act": case.options["act"]} if "act" in case.options else {}
        returned = op(*given, **named)
        values = (returned,) if len(spec.returns) == 1 else returned
        results = dict(zip((one.name for one in spec.returns), values, strict=True))
        for name, want in oracle(case.op)(case.options, arguments).results.items():
            base, _, part = name.partition(".")
            value = results[base]
            if want is not None:
                one = on_cpu(value.parts[part] if part else value)
                holds(name, one, want, case, fp8_sums.cuts_sums(device))

    return run


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Weight):
        parts = {name: part.to(device) for name, part in value.parts.items()}
        return Weight(value.format, value.shape, parts)
    return value
