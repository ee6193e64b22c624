"""A machine with TPUs, as far as it can be told without one: what is found, what is refused, and
what a session tells of its devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ml4core.api import Deployment, Device, ModelSpec, Refused
from ml4core_tpu import backend, mesh_runtime, tpu_start
from ml4core_tpu.backend import HBM_BYTES, TpuBackend
from ml4core_tpu.compilation import stays_on_devices
from ml4core_tpu.device_memory import TpuMemory, told_memory
from ml4core_tpu.driver import Chip, find_chips
from ml4core_tpu.layouts import LANE33, TILES

TPU = Device("real", "TPU v7x", "tpu7x", "cpu", memory_bytes=HBM_BYTES)
needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="there is no jax")


@pytest.fixture
def deployment(published: ModelSpec) -> Deployment:
    return Deployment(
        published,
        TPU,
        dtype="bfloat16",
        kv_layout=TILES,
        index_layout=LANE33,
        block_size=1024,
        max_model_len=1 << 20,
        max_num_seqs=128,
        tensor_parallel_size=8,
    )


@pytest.fixture
def four_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of the slice, with the libraries that it wants."""
    chips = tuple(Chip(index, "tpu7x") for index in range(4))
    monkeypatch.setattr(backend, "find_chips", lambda: (chips, ()))
    monkeypatch.setattr(backend, "find_libtpu", lambda chips: ("libtpu 0.0.42.1", ()))
    monkeypatch.setattr(backend, "find_runtime", lambda: ("jax 0.10.2", ()))


def refused(deployment: Deployment) -> str:
    with pytest.raises(Refused) as error:
        TpuBackend().open(deployment)
    return str(error.value)


def test_each_chip_is_two_devices(four_chips: None) -> None:
    found = TpuBackend().probe()
    assert found.refusals == ()
    real = [one for one in found.devices if one.kind == "real"]
    assert [(one.index, one.arch, one.memory_bytes) for one in real] == [
        (index, "tpu7x", HBM_BYTES) for index in range(8)
    ]
    # torch has the host's tensors there, and no other.
    assert {one.torch_device for one in real} == {"cpu"}
    assert found.devices[-1].kind == "interpreted"


def test_chips_that_may_not_be_used_are_no_devices(
    monkeypatch: pytest.MonkeyPatch, four_chips: None, tmp_path: Path
) -> None:
    pci = tmp_path / "sys/bus/pci/devices/0000:00:05.0"
    pci.mkdir(parents=True)
    (pci / "vendor").write_text("0x1ae0\n")
    (pci / "device").write_text("0x0076\n")
    monkeypatch.setattr(backend, "find_chips", lambda: find_chips(tmp_path))
    found = TpuBackend().probe()
    assert [one.kind for one in found.devices] == ["interpreted"]
    assert [one.subject for one in found.refusals] == ["driver"]


def test_a_host_with_too_few_devices_is_told_before_jax_starts(
    four_chips: None, deployment: Deployment
) -> None:
    text = refused(replace(deployment, tensor_parallel_size=16))
    assert "this host's chips are 8 devices" in text
    assert "works: --tensor-parallel-size 8 or less" in text


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ({"runtime": "torch_xla"}, "its sessions run on the host alone"),
        ({"runtime": "torch_tpu"}, "no session runs on them"),
        ({"resident": False}, "have no other place"),
        ({"resident": 1}, "can't be 1"),
    ],
)
def test_what_no_session_of_a_tpu_does_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    four_chips: None,
    deployment: Deployment,
    own: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setattr("ml4core_tpu.runtimes.find_spec", lambda name: object())
    text = refused(replace(deployment, additional_config={"tpu": own}))
    assert reason in text
    assert text.count("[tpu]") == 1


def test_caches_stay_on_tpus_and_elsewhere_where_that_is_asked_for(
    device: Device, deployment: Deployment
) -> None:
    host = replace(deployment, device=device)
    assert stays_on_devices(deployment)
    assert not stays_on_devices(host)
    assert stays_on_devices(replace(host, additional_config={"tpu": {"resident": True}}))


def test_kernels_are_compiled_on_tpus_and_interpreted_nowhere_else(
    device: Device, deployment: Deployment
) -> None:
    assert mesh_runtime.target_of(deployment) == "tpu"
    assert mesh_runtime.target_of(replace(deployment, device=device)) == "host"


@needs_jax
def test_a_tpu_opens(
    monkeypatch: pytest.MonkeyPatch, four_chips: None, deployment: Deployment
) -> None:
    """With a device of the host in its place: caches lie there, and programs are for a TPU."""
    import jax

    monkeypatch.setattr(mesh_runtime, "start_tpus", lambda: None)
    asked: list[str] = []

    def local(platform: str) -> list[Any]:
        asked.append(platform)
        return jax.local_devices()

    monkeypatch.setattr(mesh_runtime, "local_devices", local)
    monkeypatch.setattr("ml4core_tpu.compilation._default_folder", lambda: "")
    session: Any = TpuBackend().open(replace(deployment, tensor_parallel_size=1))
    try:
        assert asked == ["tpu", "cpu"]
        assert session.switches["devices"] == "1 of cpu, kernels for tpu"
        cache = session.alloc_kv(session.layouts[TILES], 2, 1024)
        assert cache.parts[0].array.sharding.device_set == set(jax.local_devices()[:1])
        layer = deployment.model.layers[1]
        assert session._layers.form(layer, cache).target == "tpu"
        assert session._images._target == "tpu"
    finally:
        session.close()


@needs_jax
def test_a_host_has_its_own_place_in_the_slice(
    monkeypatch: pytest.MonkeyPatch, four_chips: None, deployment: Deployment
) -> None:
    """Else it would load another host's experts, and nobody would know."""
    devices = [SimpleNamespace(device_kind="TPU7x", id=24 + i, process_index=3) for i in range(8)]
    monkeypatch.setattr(mesh_runtime, "start_tpus", lambda: None)
    monkeypatch.setattr(mesh_runtime, "local_devices", lambda platform: devices)
    monkeypatch.setattr(mesh_runtime, "_meet", lambda deployment: None)
    text = refused(replace(deployment, data_parallel_size=4, data_parallel_rank=1))
    assert "this host is process 3 of its slice, and would be replica 1" in text
    assert "works: --data-parallel-start-rank 3" in text


CHILD = """
from ml4core.api import Refused
from ml4core_tpu.tpu_start import local_devices, start_tpus
{before}
try:
    start_tpus()
    print(local_devices("tpu"))
except Refused as refused:
    print(refused.refusals[0].subject, "|", refused.refusals[0].reason.splitlines()[0])
"""


@needs_jax
@pytest.mark.multiprocess
@pytest.mark.skipif(find_spec("libtpu") is None, reason="there is no libtpu")
@pytest.mark.skipif(bool(find_chips()[0]), reason="there is a TPU")
@pytest.mark.parametrize(
    ("before", "variables", "said"),
    [
        ("", {}, "device | JAX has no devices of platform tpu: Unable to initialize backend 'tpu'"),
        ("", {"JAX_PLATFORMS": "cpu"}, "JAX_PLATFORMS | JAX is told to use cpu alone"),
        ("import jax", {}, "device | JAX has no devices of platform tpu: Unable to initialize"),
        ("import jax; jax.devices()", {}, "device | JAX has no devices of platform tpu: Backend"),
    ],
)
def test_a_tpu_that_does_not_start_is_never_the_host(
    before: str, variables: dict[str, str], said: str
) -> None:
    """libtpu's own words, within seconds: JAX would run on the host without one."""
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    ended = subprocess.run(
        [sys.executable, "-c", CHILD.format(before=before)],
        env=kept | {"TPU_SKIP_MDS_QUERY": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert said in ended.stdout, ended.stderr[-2000:]


def test_devices_of_another_generation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    others = [SimpleNamespace(device_kind="TPU v6 lite", id=0)]
    monkeypatch.setattr(jax, "local_devices", lambda backend: others)
    with pytest.raises(Refused, match="of kind TPU v6 lite"):
        tpu_start.local_devices("tpu")


def test_memory_is_that_of_the_fullest_device() -> None:
    first = {"bytes_limit": 100, "bytes_in_use": 60, "peak_bytes_in_use": 80, "bytes_reserved": 5}
    other = {"bytes_limit": 100, "bytes_in_use": 70, "peak_bytes_in_use": 71}
    figures = TpuMemory([lambda: first, lambda: other]).figures()
    assert figures == (100, 25, 70, 70, 80)


def test_a_device_that_tells_nothing_has_no_figures() -> None:
    silent = SimpleNamespace(memory_stats=lambda: None)
    assert told_memory([silent]) is None
    telling = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2, "bytes_in_use": 1})
    found = told_memory([telling])
    assert found is not None
    assert found.figures() == (2, 1, 1, 1, 1)
