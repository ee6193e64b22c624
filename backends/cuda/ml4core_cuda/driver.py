"""What the NVIDIA driver says, asked through libcuda: needs no torch and opens no context."""

from __future__ import annotations

import ctypes
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml4core.api import Refusal

_LIBRARY = "libcuda.so.1"
_NAME_BYTES = 256
# CUdevice_attribute
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_REMEDY = (
    "an NVIDIA driver with which `nvidia-smi` lists the GPU; a container needs `--gpus all` as well"
)


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver offers to this process. ``memory_bytes`` is all of it, used or not."""

    index: int
    name: str
    arch: str
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.name} ({self.arch}, {self.memory_bytes / 2**30:.1f} GiB)"


class DriverError(RuntimeError):
    """A call of the driver that failed, with the driver's own text."""


def find_gpus() -> tuple[tuple[Gpu, ...], tuple[Refusal, ...]]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, and why there are none."""
    try:
        gpus = ask(ctypes.CDLL(_LIBRARY))
    except (OSError, DriverError) as error:
        reason = f"{error}; {_traces(Path('/dev'))}"
        return (), (Refusal("cuda", "driver", reason, _REMEDY),)
    if not gpus:
        return (), (Refusal("cuda", "GPU", f"the driver lists none; {_traces(Path('/dev'))}"),)
    return gpus, ()


def ask(driver: Any) -> tuple[Gpu, ...]:
    """The GPUs that a loaded libcuda lists. Raises ``DriverError``."""
    count = ctypes.c_int()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    return tuple(_gpu(driver, index) for index in range(count.value))


def _gpu(driver: Any, index: int) -> Gpu:
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    memory = ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(driver, "cuDeviceGet", ctypes.byref(device), index)
    _call(driver, "cuDeviceGetName", name, _NAME_BYTES, device)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(major), _CAPABILITY_MAJOR, device)
    _call(driver, "cuDeviceGetAttribute", ctypes.byref(minor), _CAPABILITY_MINOR, device)
    return Gpu(index, name.value.decode(), f"sm_{major.value}{minor.value}", memory.value)


def _call(driver: Any, function: str, *arguments: object) -> None:
    code = getattr(driver, function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        said = (text.value or b"unknown error").decode()
        raise DriverError(f"{function} failed with {code}: {said}")


def _traces(dev: Path) -> str:
    """What else tells whether a driver is there."""
    nodes = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    tool = shutil.which("nvidia-smi")
    return (
        f"device nodes: {', '.join(nodes) or f'no {dev}/nvidia*'}; "
        f"nvidia-smi: {tool or 'not on PATH'}; "
        f"CUDA_VISIBLE_DEVICES: {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
    )
