"""The devices of this backend: real ones, and those that stand in for them where asked for."""

from __future__ import annotations

from collections.abc import Mapping

from ml4core.api import Device
from ml4core_rocm.driver import Gpu
from ml4core_triton import libraries

SERVED = frozenset({"gfx942", "gfx950"})
"""Architectures that the backend is made for."""

CUS: Mapping[str, int] = {"gfx950": 256, "gfx942": 304}
"""Compute units of a whole, unpartitioned GPU of the architecture: MI350X and MI355X, MI300X."""

REFERENCE = Device(
    "real", "AMD Instinct MI350X", "gfx950", "cuda:0", memory_bytes=288 * 2**30,
    details={"cus": str(CUS["gfx950"])},
)  # fmt: skip
"""The device that a deployment is judged for where none is found, as by ``--dry-run``."""

FLAVOUR: Mapping[str, str] = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn"}
"""Architecture -> the flavour of FP8 that its matrix units compute with. It goes by the
architecture, not by the vendor."""


def real(gpu: Gpu, details: Mapping[str, str]) -> Device:
    """torch calls ROCm devices ``cuda``."""
    facts = {**details, "cus": str(gpu.cus)} if gpu.cus else dict(details)
    name = f"AMD GPU {gpu.arch}"
    return Device("real", name, gpu.arch, f"cuda:{gpu.index}", gpu.index, gpu.memory_bytes, facts)


def interpreted(details: Mapping[str, str]) -> Device:
    name = "Triton's interpreter on the host"
    return Device("interpreted", name, "gfx950", "cpu", details=details)


def fake(details: Mapping[str, str]) -> Device:
    """Ops composed in torch on the host, under the architecture's capabilities and refusals."""
    return Device("fake", "torch on the host, as gfx950", "gfx950", "cpu", details=details)


def source(other: str, torch_device: str, details: Mapping[str, str]) -> Device:
    """A GPU of another maker, for which the sources of kernels are compiled: it shows what they
    compute, and nothing of what is compiled of them for an AMD GPU.
    """
    name = f"sources of gfx950's kernels, compiled for {other}"
    return Device("source", name, "gfx950", torch_device, details=details)


def fp8_flavour(arch: str) -> str:
    """``e4m3fn`` or ``e4m3fnuz``. ``KeyError`` for an architecture that isn't served: none is
    assumed.
    """
    if arch not in FLAVOUR:
        known = ", ".join(f"{name}: {flavour}" for name, flavour in sorted(FLAVOUR.items()))
        raise KeyError(f"the flavour of FP8 of architecture {arch!r} is not known; known: {known}")
    return FLAVOUR[arch]


def release() -> str:
    return libraries.release("ml4core-rocm")
