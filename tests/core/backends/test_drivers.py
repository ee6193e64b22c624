"""What each plugin reads from its driver, on machines made of files and of a stand-in library."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from ml4core_cuda import driver as cuda
from ml4core_rocm import driver as rocm
from ml4core_tpu import driver as tpu

GIB = 2**30


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


class Libcuda:
    """Answers as libcuda does: a code is returned, results go through pointers."""

    ATTRIBUTES = (75, 76)

    def __init__(self, *gpus: tuple[str, int, int, int], fails: str = "") -> None:
        self.gpus = gpus
        self.initialised = False
        if fails:
            setattr(self, fails, lambda *arguments: 999)

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        self.initialised = True
        return 0 if self.gpus else 100

    def cuDeviceGetCount(self, count: Any) -> int:
        assert self.initialised
        count._obj.value = len(self.gpus)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        assert size == len(name)
        name.value = self.gpus[device.value][0].encode()
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
        size._obj.value = self.gpus[device.value][3]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = self.gpus[device.value][1 + self.ATTRIBUTES.index(attribute)]
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = {100: b"no CUDA-capable device is detected"}.get(code)
        return 0


def test_cuda_lists_what_the_driver_offers() -> None:
    library = Libcuda(("NVIDIA H200", 9, 0, 140 * GIB), ("NVIDIA B200", 10, 0, 180 * GIB))
    gpus = cuda.ask(library)
    assert gpus == (
        cuda.Gpu(0, "NVIDIA H200", "sm_90", 140 * GIB),
        cuda.Gpu(1, "NVIDIA B200", "sm_100", 180 * GIB),
    )
    assert str(gpus[0]) == "NVIDIA H200 (sm_90, 140.0 GiB)"


def test_cuda_keeps_the_drivers_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Libcuda())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "none of them")
    gpus, (refusal,) = cuda.find_gpus()
    assert gpus == ()
    assert "cuInit failed with 100: no CUDA-capable device is detected" in refusal.reason
    assert "CUDA_VISIBLE_DEVICES: none of them" in refusal.reason


def test_cuda_error_without_a_text() -> None:
    library = Libcuda(("NVIDIA H200", 9, 0, GIB), fails="cuDeviceTotalMem_v2")
    with pytest.raises(cuda.DriverError, match="cuDeviceTotalMem_v2 failed with 999: unknown"):
        cuda.ask(library)


def test_cuda_library_that_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise OSError(f"{name}: invalid ELF header")

    monkeypatch.setattr(ctypes, "CDLL", fails)
    _, (refusal,) = cuda.find_gpus()
    assert "libcuda.so.1: invalid ELF header; device nodes: " in refusal.reason
    assert "nvidia-smi" in refusal.remedy


@pytest.mark.parametrize(
    ("target", "arch"),
    [(90500, "gfx950"), (90402, "gfx942"), (90010, "gfx90a"), (120001, "gfx1201")],
)
def test_rocm_names_of_targets(target: int, arch: str) -> None:
    assert rocm.arch(target) == arch


def rocm_machine(root: Path) -> Path:
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 96\ngfx_target_version 0\n")
    for node, target in ((2, 90500), (10, 90402)):
        write(nodes / f"{node}/properties", f"simd_count 1024\ngfx_target_version {target}\n")
        for bank in (0, 1):
            write(
                nodes / f"{node}/mem_banks/{bank}/properties",
                f"heap_type 1\nsize_in_bytes {72 * GIB}\nflags 0\n",
            )
    write(root / "dev/kfd", "")
    return root


def test_rocm_lists_the_gpus_of_the_topology(tmp_path: Path) -> None:
    gpus, refusals = rocm.find_gpus(rocm_machine(tmp_path), {})
    assert gpus == (rocm.Gpu(0, "gfx950", 144 * GIB), rocm.Gpu(1, "gfx942", 144 * GIB))
    assert refusals == ()
    assert str(gpus[0]) == "AMD GPU (gfx950, 144.0 GiB)"


def test_rocm_without_the_device_node(tmp_path: Path) -> None:
    machine = rocm_machine(tmp_path)
    (machine / "dev/kfd").unlink()
    gpus, (refusal,) = rocm.find_gpus(machine, {})
    assert len(gpus) == 2
    assert refusal.reason == f"there is no {machine}/dev/kfd"
    assert "--device /dev/kfd" in refusal.remedy


def test_rocm_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = rocm_machine(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != machine / "dev/kfd")
    _, (refusal,) = rocm.find_gpus(machine, {})
    assert "may not be read and written by user" in refusal.reason
    assert "groups render and video" in refusal.remedy


def test_rocm_machine_without_gpu_tells_both(tmp_path: Path) -> None:
    gpus, refusals = rocm.find_gpus(tmp_path, {})
    assert gpus == ()
    assert [refusal.subject for refusal in refusals] == ["driver", "GPU"]


def tpu_machine(root: Path, node: str = "dev/vfio/0") -> Path:
    devices = {"0000:00:04.0": "0x0076", "0000:00:05.0": "0x0076", "0000:00:06.0": "0x0042"}
    for address, device in devices.items():
        write(root / f"sys/bus/pci/devices/{address}/vendor", "0x1ae0\n")
        write(root / f"sys/bus/pci/devices/{address}/device", f"{device}\n")
    write(root / "sys/bus/pci/devices/0000:00:07.0/vendor", "0x8086\n")
    write(root / "sys/bus/pci/devices/0000:00:07.0/device", "0x0076\n")
    if node:
        write(root / node, "")
    return root


@pytest.mark.parametrize("node", ["dev/vfio/0", "dev/accel0", "dev/accel/accel0"])
def test_tpu_lists_the_chips_of_the_bus(tmp_path: Path, node: str) -> None:
    chips, refusals = tpu.find_chips(tpu_machine(tmp_path, node))
    assert chips == (tpu.Chip(0, "tpu7x"), tpu.Chip(1, "tpu7x"))
    assert refusals == ()
    assert str(chips[0]) == "TPU chip (tpu7x)"


@pytest.mark.parametrize("node", ["", "dev/vfio/vfio"])
def test_tpu_chips_without_a_device_node(tmp_path: Path, node: str) -> None:
    chips, (refusal,) = tpu.find_chips(tpu_machine(tmp_path, node))
    assert len(chips) == 2
    assert refusal.subject == "driver"
    assert "no device node of 2 chips" in refusal.reason


def test_tpu_machine_without_chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    chips, (refusal,) = tpu.find_chips(tmp_path)
    assert chips == ()
    assert "no TPU on the PCI bus" in refusal.reason
    assert "TPU_WORKER_ID" in refusal.reason
