"""What the three accelerator plugins have in common, on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest

from ml4core.api import Capabilities, Deployment, Device, ModelSpec, Refused
from ml4core.registry import PluginRecord, load_plugin, probe, select

PROJECTS = Path(__file__).resolve().parents[3] / "backends"
VENDOR_LIBRARIES = (
    *("torch", "triton", "flash_mla", "flashinfer", "deep_gemm", "aiter", "flydsl"),
    *("jax", "jaxlib", "libtpu", "torch_xla", "torch_tpu"),
)


def test_loads_with_the_name_of_its_flag(record: PluginRecord) -> None:
    backend = load_plugin(record).backend
    assert backend.name == record.name
    assert backend.priority > 0


@pytest.mark.parametrize(
    ("name", "target"),
    [("cpu", "ml4core.cpu"), *((name, f"ml4core_{name}") for name in ("cuda", "rocm", "tpu"))],
)
def test_loading_imports_no_vendor_library_and_no_torch(name: str, target: str) -> None:
    if find_spec(target) is None:
        pytest.skip(f"{target} is not installed")
    code = (
        "import json, sys\n"
        "from ml4core.registry import PluginRecord, discover, load_plugin\n"
        "discover()\n"
        f"backend = load_plugin(PluginRecord({name!r}, '', '', {target!r})).backend\n"
        "backend.name, backend.priority\n"
        f"print(json.dumps(sorted(set({VENDOR_LIBRARIES!r}) & set(sys.modules))))"
    )
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_probe_gathers_all_that_is_missing(kernelless: PluginRecord) -> None:
    result = probe(kernelless, timeout=120)
    assert (result.state, result.devices) == ("unavailable", ())
    assert {refusal.source for refusal in result.refusals} == {kernelless.name}
    last = result.refusals[-1]
    assert last.subject == "kernels"
    assert f"of {kernelless.distribution} has no kernels yet; found: " in last.reason
    assert last.remedy == "--backend cpu"


def test_named_backend_is_refused_with_all_of_it(kernelless: PluginRecord) -> None:
    with pytest.raises(Refused, match=f"^--backend {kernelless.name} is refused for ") as refused:
        select(kernelless.name, records=[kernelless], timeout=120)
    assert set(refused.value.refusals) == set(probe(kernelless, timeout=120).refusals)


def test_opening_is_refused(kernelless: PluginRecord) -> None:
    backend = load_plugin(kernelless).backend
    device = Device("real", "a device", "an arch", "cpu")
    with pytest.raises(Refused, match=f"^--backend {kernelless.name} is refused for ") as refused:
        backend.open(Deployment(cast(ModelSpec, None), device))
    assert "kernels" in {refusal.subject for refusal in refused.value.refusals}


def test_declares_nothing_yet(kernelless: PluginRecord) -> None:
    device = Device("real", "a device", "an arch", "cpu")
    assert load_plugin(kernelless).backend.capabilities(device) == Capabilities(frozenset())


def test_hardware_says_nothing_against_a_common_deployment(record: PluginRecord) -> None:
    hook = load_plugin(record).manager.hook.ml4core_refusals
    device = Device("real", "a device", "an arch", "cpu")
    plain = Deployment(cast(ModelSpec, None), device, kv_layout="bf16", index_layout="planar_f32")
    for deployment in (plain, replace(plain, kv_layout="fp32"), replace(plain, kv_layout="e4m3")):
        answers = hook(deployment=deployment, capabilities=Capabilities(frozenset()))
        assert [list(answer) for answer in answers] == [[]]


def test_siblings_hold_the_same_files() -> None:
    files = {
        name: {
            path.relative_to(PROJECTS / name / f"ml4core_{name}").as_posix()
            for path in (PROJECTS / name / f"ml4core_{name}").rglob("*.py")
        }
        for name in ("cuda", "rocm", "tpu")
    }
    common = {"__init__.py", "backend.py", "capabilities.py", "driver.py", "libraries.py"}
    assert all(common <= held for held in files.values()), files
