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


def test_a_tpu_that_is_missing_is_refused_with_every_reason(tpu: PluginRecord) -> None:
    """Where JAX is, the host's interpreted device is found beside."""
    result = probe(tpu, timeout=120)
    assert {refusal.source for refusal in result.refusals} == {"tpu"}
    assert "no TPU on the PCI bus" in result.refusals[0].reason
    kinds = [found.device.kind for found in result.devices]
    assert kinds == (["interpreted"] if find_spec("jax") else [])
    with pytest.raises(Refused, match=r"^--backend tpu is refused for ") as refused:
        select("tpu", records=[tpu], timeout=120)
    assert set(result.refusals) <= set(refused.value.refusals)


def test_a_device_of_another_make_is_not_opened(tpu: PluginRecord) -> None:
    backend = load_plugin(tpu).backend
    device = Device("real", "a device", "an arch", "cpu")
    with pytest.raises(Refused, match=r"^--backend tpu is refused for ") as refused:
        backend.open(Deployment(cast(ModelSpec, None), device))
    assert "device" in {refusal.subject for refusal in refused.value.refusals}
    assert backend.capabilities(device) == Capabilities(frozenset())


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
