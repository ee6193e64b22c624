"""Backends whose default cache stores less than activations hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ml4core.api import Capabilities, Device
from ml4core.api.known_layouts import LATENT_IDS, latent_layout
from ml4core.cpu.backend import CpuBackend
from ml4core_conformance.catalog import all_checks
from ml4core_conformance.check import CheckFailed
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.passes import is_coarse
from ml4core_conformance.subject import Subject


class Narrow(CpuBackend):
    """The cpu backend with another latent layout by default."""

    def __init__(self, kv: str) -> None:
        self.kv = kv

    def capabilities(self, device: Device) -> Capabilities:
        found = super().capabilities(device)
        return replace(found, defaults={**found.defaults, "kv": self.kv})


def subject_of(kv: str) -> Subject:
    backend = Narrow(kv)
    return Subject(backend, backend.probe().devices[0], small=True)


@pytest.mark.parametrize("kv", ["fp8_ds_mla", "e4m3"])
def test_an_honest_backend_passes(kv: str) -> None:
    (check,) = (check for check in all_checks() if check.id == "model.logits[default]")
    subject = subject_of(kv)
    try:
        check.run(subject)
    finally:
        subject.close()
    # No wider than where nothing is rounded on the way: a twin in fp32 loses next to nothing.
    assert max(measure.bound for measure in subject.measures) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_caches_are_coarse(dtype: torch.dtype) -> None:
    kept = {"fp32", "bf16"} if dtype == torch.bfloat16 else {"fp32"}
    found = {id for id in LATENT_IDS if not is_coarse(latent_layout(id), dtype)}
    assert found == kept


def test_rows_beyond_their_rounding_are_noticed() -> None:
    subject = subject_of("bf16")
    exact = torch.linspace(1, 2, 576, dtype=torch.float64).expand(3, -1)
    best = exact.bfloat16().double()
    tie = torch.full((1, 8), 1 + 2.0**-8, dtype=torch.float64)
    up, down = torch.full_like(tie, 1 + 2.0**-7), torch.ones_like(tie)
    for got, nearest in ((best, best), (up, down), (down, up)):
        want = exact if got is best else tie
        errors.stored(subject, "rows", got, want, want, nearest, "a test", errors.FLOOR)
    wrong = best.clone()
    wrong[1] *= 1 + 2.0**-8
    with pytest.raises(CheckFailed, match="row 1, beyond its own rounding"):
        errors.stored(subject, "rows", wrong, exact, exact, best, "a test", errors.FLOOR)
