"""The bench of converting experts: both ways are run, compared and told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ml4core.bench import requant
from ml4core.formats import mxfp4_fp8

SMALL = ((256, 256), (128, 96))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requant, "SHAPES", SMALL)


@pytest.mark.usefixtures("small")
def test_figures_of_each_shape() -> None:
    threads = torch.get_num_threads()
    facts = requant.measure("ceil", threads=1, repeats=3)
    assert torch.get_num_threads() == threads
    json.dumps(facts)
    assert [(one["rows"], one["columns"]) for one in facts["matrices"]] == list(SMALL)
    for one in facts["matrices"]:
        speed = one["mb_per_s"]
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        assert speed["repeats"] == 3
    told = requant.text(facts)
    assert "rule ceil" in told
    assert "256 x 256: " in told


@pytest.mark.usefixtures("small")
def test_a_wrong_byte_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = mxfp4_fp8.requantize

    def wrong(*args: Any) -> Any:
        packed, scale = right(*args)
        packed[0, 0] ^= 1
        return packed, scale

    monkeypatch.setattr(mxfp4_fp8, "requantize", wrong)
    with pytest.raises(RuntimeError, match="codes differ"):
        requant.measure()
