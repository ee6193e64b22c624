"""The suite's checks on the session of TPUs, with devices of the host in their place."""

from __future__ import annotations

from collections import Counter

import pytest

from ml4core.api import Device
from ml4core_conformance.catalog import all_checks, choose
from ml4core_conformance.judge import judge_unit
from ml4core_conformance.runner import units
from ml4core_conformance.subject import Subject
from support.tpu_sessions import ResidentTpu

DEVICE = Device("interpreted", "XLA on the host", "tpu7x", "cpu")


@pytest.mark.parametrize(
    ("profiles", "words", "least"),
    [
        (("layouts",), "layout.tag", 4),
        pytest.param(("layouts",), "", 55, marks=pytest.mark.slow),
        pytest.param(("ops",), "", 600, marks=pytest.mark.slow),
        (("model",), "model.kv_bytes or model.index_share or model.fault", 4),
        (("model",), "stages and decode/reference and not decoder_layer", 6),
        (("perf",), "perf.steady_state and sync", 1),
        pytest.param(("system", "perf"), "not stall", 12, marks=pytest.mark.slow),
        pytest.param(("model",), "model or parallel or spec", 48, marks=pytest.mark.slow),
        pytest.param(("model",), "stages", 125, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")  # as the suite's own workers have it
def test_every_check_passes_or_is_refused(
    profiles: tuple[str, ...], words: str, least: int
) -> None:
    subject = Subject(ResidentTpu(), DEVICE, options={"device": "interpreted"})
    found: Counter[str] = Counter()
    for unit in units(choose(all_checks(), profiles=profiles, expression=words)):
        for result in judge_unit(subject, unit):
            found[result.status.name] += 1
            assert result.status.name in ("PASS", "UNSUPPORTED"), (result.id, result.reason)
    assert found["PASS"] >= least, found
