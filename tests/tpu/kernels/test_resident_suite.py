"""The suite's checks of ops and layouts on the session of TPUs, with devices of the host."""

from __future__ import annotations

from collections import Counter

import pytest

from ml4core.api import Device
from ml4core_conformance.catalog import all_checks, choose
from ml4core_conformance.judge import judge_unit
from ml4core_conformance.runner import units
from ml4core_conformance.subject import Subject
from ml4core_tpu.backend import TpuBackend

DEVICE = Device("interpreted", "XLA on the host", "tpu7x", "cpu")


@pytest.mark.parametrize(
    ("profiles", "words", "least"),
    [
        (("layouts",), "layout.tag", 4),
        pytest.param(("layouts",), "", 55, marks=pytest.mark.slow),
        pytest.param(("ops",), "", 600, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")  # as the suite's own workers have it
def test_every_check_passes_or_is_refused(
    profiles: tuple[str, ...], words: str, least: int
) -> None:
    subject = Subject(
        TpuBackend(), DEVICE, options={"device": "interpreted", "tpu": {"resident": True}}
    )
    found: Counter[str] = Counter()
    for unit in units(choose(all_checks(), profiles=profiles, expression=words)):
        for result in judge_unit(subject, unit):
            found[result.status.name] += 1
            assert result.status.name in ("PASS", "UNSUPPORTED"), (result.id, result.reason)
    assert found["PASS"] >= least, found
