"""Which GPUs of the topology are torch's, in which order: what the variables of ROCm leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ml4core_rocm import backend, devices, driver
from ml4core_rocm.backend import RocmBackend
from ml4core_rocm.driver import Gpu, find_gpus, visible

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
IDS = (0xAB00_0000_0000_0001, 0xAB00_0000_0000_0002, 0, 0x0C)
FIRST, SECOND, LAST = (f"GPU-{IDS[i]:016x}" for i in (0, 1, 3))


def gpus() -> tuple[Gpu, ...]:
    """Four that differ in all that a device tells of them."""
    return tuple(
        Gpu(i, ("gfx950", "gfx942")[i % 2], (i + 1) << 30, 64 * (i + 1), IDS[i]) for i in range(4)
    )


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({}, [0, 1, 2, 3]),
        # ROCr's list, by the driver's numbers, or by ids and how they begin
        ({ROCR: "2"}, [2]),
        ({ROCR: "3,1"}, [3, 1]),
        ({ROCR: " 1 , 0"}, [1, 0]),
        ({ROCR: SECOND}, [1]),
        ({ROCR: f"{LAST.upper()},0,{FIRST}"}, [3, 0]),
        ({ROCR: "GPU-0"}, [3]),
        ({ROCR: "3,GPU-ab,0"}, [3]),  # two begin so
        ({ROCR: "gpu-0000000000000099"}, []),
        ({ROCR: "GPU-,0"}, []),
        ({ROCR: "1,1,0"}, [1]),  # a repeat ends it
        ({ROCR: "1,7,0"}, [1]),
        ({ROCR: "1,-1,0"}, [1]),
        ({ROCR: ""}, []),
        ({ROCR: "-1"}, []),
        # HIP's
        ({HIP: "2,0"}, [2, 0]),
        ({HIP: "1,1,0"}, [1, 0]),  # a repeat counts once
        ({HIP: "0, 1"}, [0]),  # a blank is no number to HIP
        ({HIP: "01,0"}, []),
        ({HIP: "0,four"}, [0]),
        ({HIP: f"{SECOND},0"}, [1, 0]),
        ({HIP: "GPU-99"}, []),
        ({HIP: ""}, []),
        ({HIP: "-1"}, []),
        ({CUDA: "3"}, [3]),
        ({CUDA: ""}, []),
        ({CUDA: "-1"}, []),
        ({HIP: "1", CUDA: "3"}, [1]),
        ({HIP: "", CUDA: "3"}, []),
        # both: HIP counts in what ROCr leaves
        ({ROCR: "3,1", HIP: "1"}, [1]),
        ({ROCR: "3,1", CUDA: "1,0"}, [1, 3]),
        ({ROCR: "3,1", HIP: "2"}, []),
        ({ROCR: "2,3", HIP: LAST}, [3]),
        ({ROCR: "2,3", HIP: FIRST}, []),
    ],
)
def test_what_is_left(environment: Mapping[str, str], want: list[int]) -> None:
    all_of_them = gpus()
    found, _ = visible(all_of_them, environment)
    assert [gpu.index for gpu in found] == list(range(len(want)))
    facts = [(gpu.arch, gpu.memory_bytes, gpu.cus, gpu.unique_id) for gpu in found]
    assert facts == [
        (one.arch, one.memory_bytes, one.cus, one.unique_id)
        for one in map(all_of_them.__getitem__, want)
    ]


def machine(root: Path, *nodes: str) -> Path:
    for number, text in enumerate(nodes):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        (folder / "mem_banks/0").mkdir(parents=True)
        (folder / "properties").write_text(text, "utf-8")
        (folder / "mem_banks/0/properties").write_text(
            f"heap_type 1\nsize_in_bytes {number << 30}\n", "utf-8"
        )
    (root / "dev").mkdir()
    (root / "dev/kfd").write_text("", "utf-8")
    return root


CPU = "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n"
MI350 = "simd_count 1024\nsimd_per_cu 4\ngfx_target_version 90500\nunique_id 12297829382473034411\n"
MI300 = "simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\n"
QUIET = "simd_count 1216\ngfx_target_version 90402\n"
ODD = "simd_count 1216\nsimd_per_cu 0\ngfx_target_version 90402\n"


def test_facts_of_each_gpu(tmp_path: Path) -> None:
    """Compute units are SIMDs by those of a unit, where the driver says how many these are."""
    found, refusals = find_gpus(machine(tmp_path, CPU, MI350, MI300, QUIET, ODD), {})
    assert refusals == ()
    assert found == (
        Gpu(0, "gfx950", 1 << 30, 256, 0xAAAA_AAAA_AAAA_AAAB),
        Gpu(1, "gfx942", 2 << 30, 304),
        Gpu(2, "gfx942", 3 << 30, 0),
        Gpu(3, "gfx942", 4 << 30, 1216),
    )


@pytest.mark.parametrize(
    ("environment", "reason", "remedy"),
    [
        ({HIP: ""}, "lists 2, of which HIP_VISIBLE_DEVICES='' leaves none", HIP),
        ({CUDA: "-1"}, "lists 2, of which CUDA_VISIBLE_DEVICES='-1' leaves none", CUDA),
        (
            {ROCR: "1", HIP: "1"},
            "of which ROCR_VISIBLE_DEVICES='1' leaves 1, HIP_VISIBLE_DEVICES='1' leaves none",
            HIP,
        ),
        (
            {ROCR: "5", HIP: "0"},
            "ROCR_VISIBLE_DEVICES='5' leaves none, HIP_VISIBLE_DEVICES='0' leaves none",
            ROCR,
        ),
    ],
)
def test_hidden_gpus_are_told_of(
    tmp_path: Path, environment: Mapping[str, str], reason: str, remedy: str
) -> None:
    found, (refusal,) = find_gpus(machine(tmp_path, CPU, MI350, MI300), environment)
    assert found == ()
    assert (refusal.source, refusal.subject) == ("rocm", "GPU")
    assert reason in refusal.reason
    assert refusal.remedy.startswith(f"{remedy} unset")


def test_a_machine_without_gpus_has_none_to_hide(tmp_path: Path) -> None:
    _, (refusal,) = find_gpus(machine(tmp_path, CPU), {HIP: "0"})
    assert refusal.reason.endswith("nodes lists none")


def test_devices_are_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the probe and the process's own environment."""
    root = machine(tmp_path, CPU, MI350, MI300)
    find: Callable[..., Any] = driver.find_gpus
    monkeypatch.setattr(backend, "find_gpus", lambda: find(root))
    monkeypatch.setattr(backend, "find_torch", lambda: ("torch 2.13", ()))
    monkeypatch.setattr(backend, "find_triton", lambda: ("triton 3.7.1", ()))
    monkeypatch.setattr(backend, "find_other_gpu", lambda: "")
    for name in (HIP, CUDA):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ROCR, "1,0")
    real = [device for device in RocmBackend().probe().devices if device.kind == "real"]
    assert [(d.torch_device, d.index, d.arch, d.details["cus"], d.memory_bytes) for d in real] == [
        ("cuda:0", 0, "gfx942", "304", 2 << 30),
        ("cuda:1", 1, "gfx950", "256", 1 << 30),
    ]
    monkeypatch.setenv(HIP, "1")
    (only,) = (device for device in RocmBackend().probe().devices if device.kind == "real")
    assert (only.torch_device, only.arch) == ("cuda:0", "gfx950")
    assert only.details["cus"] == str(devices.CUS["gfx950"])
