"""The one command that runs the suite on a GPU of another maker, tried out without one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "device/rocm/on_device.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("ml4core_on_rocm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.multiprocess
def test_what_it_runs_where_there_is_no_gpu(script: Any, tmp_path: Path) -> None:
    words = ["--device", "interpreted", "--jobs", "1", "-k", "to_slots", "--budget-s", "280"]
    assert script.main(["--out", str(tmp_path), *words]) == 0, (
        tmp_path / "rocm-interpreted.log"
    ).read_text("utf-8")
    result = json.loads((tmp_path / "rocm-interpreted.json").read_text("utf-8"))
    assert result["device"]["kind"] == "interpreted"
    assert result["plugin"]["backend"] == "rocm"
    assert result["selection"]["profiles"] == ["ops", "layouts"]
    assert {one["status"] for one in result["results"]} == {"PASS", "UNSUPPORTED"}
    assert (tmp_path / "rocm-interpreted.xml").is_file()


@pytest.mark.multiprocess
def test_without_a_gpu_nothing_is_claimed(script: Any, tmp_path: Path) -> None:
    """Of a kind that isn't here every check is NOT-RUN, and the result says so."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code = script.main(["--out", str(tmp_path), "--jobs", "1", "--budget-s", "280"])
    assert code == 5
    result = json.loads((tmp_path / "rocm-source.json").read_text("utf-8"))
    assert result["device"]["kind"] == "none"
    assert {one["status"] for one in result["results"]} == {"NOT-RUN"}
