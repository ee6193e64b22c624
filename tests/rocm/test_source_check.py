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


def test_a_copy_without_git_tells_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    from ml4core_conformance import facts
    from ml4core_conformance.results import GitFacts, PluginFacts

    monkeypatch.setattr(facts, "_ask_git", lambda *words: None)
    monkeypatch.delenv("ML4_SOURCE_COMMIT", raising=False)
    assert facts.checkouts(PluginFacts("rocm")) == {}
    monkeypatch.setenv("ML4_SOURCE_COMMIT", "0123456789" * 4)
    found = facts.checkouts(PluginFacts("rocm", "ml4core-rocm", target="ml4core_rocm.backend:x"))
    assert found == dict.fromkeys(
        ("ml4core-conformance", "ml4core-rocm"), GitFacts("0123456789" * 4, dirty=False)
    )
    monkeypatch.setenv("ML4_SOURCE_COMMIT", "main")
    with pytest.raises(ValueError, match="'main' is no commit"):
        facts.checkouts(PluginFacts("rocm"))


def test_parts_run_in_turn(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}
    shared = script.neighbour()

    def run(name: str, command: list[str], *rest: Any) -> int:
        told[name] = " ".join(command[2:])
        return 3 if "selftest" in command else 0

    monkeypatch.setattr(shared, "run", run)
    monkeypatch.setattr(script, "neighbour", lambda: shared)
    monkeypatch.setenv("ML4_SOURCE_COMMIT", "")
    parts = ["--part", "kernels", "--part", "mutants", "--commit", "0123456789" * 4, "-x"]
    assert script.main(["--out", str(tmp_path), *parts]) == 3
    assert list(told) == ["rocm-kernels", "rocm-mutants"]
    assert told["rocm-kernels"].startswith("pytest -q ")
    assert told["rocm-kernels"].endswith("tests/rocm/kernels -x")
    wanted = "selftest --backend rocm --device source --jobs 12 --profile ops --profile layouts -x"
    assert told["rocm-mutants"].endswith(wanted)


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
