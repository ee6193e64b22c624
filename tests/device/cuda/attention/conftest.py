"""Ops of the cuda backend on its device, or in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ml4core.api import Device
from ml4core_conformance import compare
from ml4core_conformance.case import OpCase
from ml4core_conformance.oracle.expected import Exact, Float, Selected
from ml4core_conformance.selection import selected
from ml4core_conformance.subject import Subject
from ml4core_conformance.tolerances import tolerance
from ml4core_cuda.backend import CudaBackend


@pytest.fixture(scope="package")
def subject(device: torch.device) -> Iterator[Subject]:
    real = device.type == "cuda"
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if real else "sm_90"
    found = Device("real" if real else "interpreted", str(device), arch, str(device))
    subject = Subject(CudaBackend(), found, options={} if real else {"device": "interpreted"})
    yield subject
    subject.close()


@pytest.fixture
def conforms(subject: Subject) -> Callable[[OpCase], None]:
    """Runs a case twice, poisoned, and holds results, caches and form against the oracle."""

    def run(case: OpCase) -> None:
        done = subject.evaluate(case, 0)
        assert (done.problems, done.changes, done.trespasses) == ((), (), ())
        for results in (done.results, done.again):
            for name, want in done.expected.results.items():
                found = results[name]
                if isinstance(want, Float):
                    bound = tolerance(case.op, case.variant, want.dtype)
                    compare.anomalies(name, found, want, case.id)
                    for one in (
                        compare.elements(name, found, want, bound, case.id),
                        *compare.structure(name, found, want, bound, case.id),
                        *compare.bias(name, found, want, bound, case.id),
                    ):
                        assert one.error <= one.bound, f"{one.what} at {one.where}"
                elif isinstance(want, Selected):
                    selected(name, found, want, case.id)
                elif isinstance(want, Exact):
                    compare.exact(name, found, want, case.id)
        for name, parts in done.expected.caches.items():
            for after in (done.after, done.after_again):
                cache = after[name]
                compare.caches(name, cache.parts, parts, case.id, cache.block_size)

    return run
