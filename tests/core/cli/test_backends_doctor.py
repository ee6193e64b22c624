"""`ml4 backends` and `ml4 doctor`, over plugins in every state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ml4core import registry
from ml4core.api import Capabilities, Device, Refusal
from ml4core.registry import BackendReport, FoundDevice, PluginRecord, ProbeResult

CPU = BackendReport(
    PluginRecord("cpu", "ml4core", "0.1.0", "ml4core.cpu", (1, 1)),
    ProbeResult(
        "ok",
        (
            FoundDevice(
                Device("real", "a processor", "x86_64", "cpu", memory_bytes=2**31),
                Capabilities(frozenset({"act:fp32"})),
            ),
        ),
        priority=0,
    ),
)
BROKEN = BackendReport(
    PluginRecord("odd", "odd-dist", "2.0", "odd", (1, 1)),
    ProbeResult("broken", (), (Refusal("core", "odd", "ImportError: no lib", "pip install lib"),)),
)
NO_API = BackendReport(
    PluginRecord("old", "old-dist", "0.9", "old"),
    ProbeResult("refused", (), (Refusal("core", "old", "states no API"),)),
)
FAKE = BackendReport(
    PluginRecord("sim", "sim-dist", "1.0", "sim", (1, 1)),
    ProbeResult(
        "ok", (FoundDevice(Device("fake", "a chip", "sim1", "cpu"), Capabilities(frozenset())),)
    ),
)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(*found: BackendReport) -> None:
        monkeypatch.setattr(registry, "report", lambda: list(found))

    return put


def test_backends_lists_each_with_its_state_and_reasons(ml4: Any, reports: Any) -> None:
    """B122: what can't be loaded is shown with its cause."""
    reports(CPU, BROKEN, NO_API, FAKE)
    done = ml4("backends")
    assert (done.code, done.err) == (0, "")
    head, *lines = [line.split() for line in done.out.splitlines()]
    assert head == ["NAME", "DISTRIBUTION", "VERSION", "API", "STATE", "DEVICES", "REASONS"]
    assert [line[:5] for line in lines] == [
        ["cpu", "ml4core", "0.1.0", "1-1", "ok"],
        ["odd", "odd-dist", "2.0", "1-1", "broken"],
        ["old", "old-dist", "0.9", "none", "refused"],
        ["sim", "sim-dist", "1.0", "1-1", "ok"],
    ]
    assert "a processor (x86_64), 2.0 GiB" in done.out
    assert "a chip (sim1), fake" in done.out
    assert "[core] odd: ImportError: no lib (works: pip install lib)" in done.out


def test_backends_as_json(ml4: Any, reports: Any) -> None:
    reports(CPU, BROKEN)
    done = ml4("backends", "--json")
    assert done.code == 0
    assert done.json == [CPU.to_json(), BROKEN.to_json()]


def test_no_backend_at_all(ml4: Any, reports: Any) -> None:
    reports()
    assert ml4("backends", "--json").json == []
    done = ml4("backends")
    assert done.code == 0
    assert "no backend is installed" in done.err


def test_doctor_is_content_if_cpu_runs(ml4: Any, reports: Any) -> None:
    reports(CPU, BROKEN)
    done = ml4("doctor", "--json")
    assert (done.code, done.err) == (0, "")
    found = {finding["subject"]: finding for finding in done.json}
    assert found["python"]["state"] == "ok"
    assert found["ml4core"]["state"] == "ok"
    assert found["backend cpu (from ml4core 0.1.0)"]["state"] == "ok"
    odd = found["backend odd (from odd-dist 2.0)"]
    assert (odd["state"], odd["remedy"]) == ("fault", "pip install lib")
    assert "ImportError: no lib" in odd["found"]
    for name in ("ml4core-cuda", "ml4core-rocm", "ml4core-tpu", "ml4core-conformance"):
        assert found[name]["state"] in ("ok", "absent")
        if found[name]["state"] == "absent":
            assert found[name]["remedy"] == f"pip install 'ml4core[{name[8:]}]'"


def test_doctor_fails_if_cpu_does_not_run(ml4: Any, reports: Any) -> None:
    reports(FAKE)
    done = ml4("doctor")
    assert (done.code, done.err) == (1, "")
    assert "not registered by any installed distribution" in done.out
    sick = BackendReport(
        CPU.record,
        ProbeResult("broken", (), (Refusal("core", "cpu", "no torch", "pip install torch"),)),
    )
    reports(sick)
    done = ml4("doctor")
    assert done.code == 1
    assert "pip install torch" in done.out


def test_doctor_reads_what_ml4core_requires(
    ml4: Any, reports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ml4core.cli import doctor

    lines = ["rich", "surely-not-there>=3", "torch>=99; extra == 'x'"]
    monkeypatch.setattr(doctor, "requires", lambda name: lines)
    reports(CPU)
    found = {finding["subject"]: finding for finding in ml4("doctor", "--json").json}
    assert found["rich"]["state"] == "ok"
    missing = found["surely-not-there"]
    assert (missing["state"], missing["remedy"]) == ("fault", "pip install 'surely-not-there>=3'")
    assert "torch" not in found


def test_doctor_tells_of_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from ml4core.cli import doctor

    monkeypatch.setattr(doctor, "version", lambda name: "2.8.1+cpu")
    monkeypatch.setattr(doctor, "import_module", lambda name: None)
    assert doctor._library("torch", "torch>=2.11").state == "fault"
    monkeypatch.setattr(doctor, "version", lambda name: "2.10.0")
    assert doctor._library("torch", "torch>=2.11").state == "ok"


def test_doctor_tells_of_a_library_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    from ml4core.cli import doctor

    def fail(name: str) -> None:
        raise OSError("libx.so: cannot open")

    monkeypatch.setattr(doctor, "import_module", fail)
    finding = doctor._library("rich", "rich")
    assert finding.state == "fault"
    assert "OSError: libx.so: cannot open" in finding.found


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_doctor_tells_of_a_cache_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ml4core.cli import doctor

    tmp_path.chmod(0o500)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert doctor._cache().state == "fault"


def test_doctor_tells_of_a_file_in_the_place_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ml4core.cli import doctor

    (tmp_path / "hub").write_text("", "utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert doctor._cache().state == "fault"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "new" / "hub"))
    assert doctor._cache().state == "ok"
