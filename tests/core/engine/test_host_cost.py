"""What a step costs on the host, beside the model: an accelerator waits for it."""

from __future__ import annotations

import pytest

from ml4core.bench import host


@pytest.mark.slow  # a figure of an idle machine: a busy one is no failure
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("requests", "target"), [(1, 0.15e-3), (32, 0.5e-3), (256, 2e-3)])
def test_a_step_of_decodes(requests: int, target: float, overlap: bool) -> None:
    """Targets are seconds a step on one core that nobody else uses: the best of many counts."""
    assert host.TARGETS[requests] == target
    assert min(span.wall for span in host.steps(requests, 300, overlap=overlap)) < target
