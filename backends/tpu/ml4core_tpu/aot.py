"""Compiles for TPUs ahead of time, with libtpu and no TPU: what each program takes, and what would
not fit.

libtpu's compiler is asked for the devices of a named slice. Nothing is looked for on the network:
the metadata server of Google's cloud is left alone, and the slice's facts are given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import MappingProxyType
from typing import Any

from ml4core.api import Refusal
from ml4core_tpu.aot_kernels import Kernel, kernels_of
from ml4core_tpu.backend import HBM_BYTES
from ml4core_tpu.bridge import host_environment
from ml4core_tpu.compilation import without_cache

SLICE = "tpu7x:2x2x1"
"""One host: 4 chips, 8 devices."""
HBM_PER_S, BF16_FLOPS, FP8_FLOPS = 3.7e12, 1.155e15, 2.3e15
"""Of one device, as published."""
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_VMEM = re.compile(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
)
_USED = re.compile(r"(scoped )?(vmem|smem|hbm)", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """A program at shapes worth knowing.

    Attributes:
        program: a jitted function.
        arguments: shapes and dtypes, by position; tuples for trees.
        options: static arguments.
        least_bytes: what it has to move of its inputs and outputs, once each.
        flops: what it has to compute.
        fp8: whether its products are of FP8 operands.
    """

    name: str
    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    least_bytes: int = 0
    flops: int = 0
    fp8: bool = False

    @property
    def floor_s(self) -> float:
        """Seconds that no program of this work can beat on one device."""
        return max(
            self.least_bytes / HBM_PER_S, self.flops / (FP8_FLOPS if self.fp8 else BF16_FLOPS)
        )


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a case.

    Attributes:
        seconds: of tracing, lowering and compiling.
        arguments, outputs, temporaries, aliased: bytes of a device's memory.
        counted: bytes that the program moves by its own account; 0 where it gives none.
        collectives: how many of each kind.
        vmem: bytes that the largest of its kernels and fusions takes, by the compiler's account.
        kernels: of Pallas, in order.
    """

    case: Case
    seconds: float
    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    counted: float
    collectives: Mapping[str, int]
    vmem: int
    kernels: tuple[Kernel, ...]

    @property
    def smem(self) -> int:
        """Bytes of scalar memory that the largest of its kernels takes."""
        return max((kernel.smem for kernel in self.kernels), default=0)

    @property
    def hbm(self) -> int:
        return self.arguments + self.outputs + self.temporaries - self.aliased

    @property
    def too_large(self) -> bool:
        return self.hbm > HBM_BYTES

    @property
    def heavy(self) -> bool:
        """Whether it moves more than half again of what it has to."""
        return bool(self.case.least_bytes) and self.counted > 1.5 * self.case.least_bytes


class Refused(Exception):
    """The compiler refuses a program: the memory that overflows, or its own words."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(str(refusal))


def devices_of(topology: str) -> list[Any]:
    """The devices of a named slice, of host 0 first. Raises ``ValueError`` for an unknown name."""
    host_environment()
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:
        raise ValueError(
            f"libtpu knows no slice {topology!r}: {str(error).splitlines()[0]}; works: {SLICE}, "
            "tpu7x:2x2x4"
        ) from error
    return sorted(found.devices, key=lambda device: (device.process_index, device.id))


def compile_case(case: Case, device: Any) -> Compiled:
    """Compiles a case for one device. Raises ``Refused``."""
    import jax
    from jax.sharding import SingleDeviceSharding

    placed = SingleDeviceSharding(device)

    def at(shape: Any) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=placed)

    return compile_program(case, jax.tree.map(at, case.arguments))


def compile_program(case: Case, arguments: tuple[Any, ...]) -> Compiled:
    """Compiles a case for arguments that say where they lie. Raises ``Refused``."""
    start = perf_counter()
    try:
        traced = case.program.trace(*arguments, **case.options)  # type: ignore[attr-defined]
        with without_cache():
            program = traced.lower(lowering_platforms=("tpu",)).compile()
    except Exception as error:
        raise Refused(_refusal(case, error)) from error
    seconds = perf_counter() - start
    memory, text = program.memory_analysis(), program.as_text()
    cost = program.cost_analysis() or {}
    return Compiled(
        case,
        seconds,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        float(cost.get("bytes accessed", 0.0)),
        MappingProxyType(
            {
                kind: count
                for kind in _COLLECTIVES
                if (count := len(re.findall(rf"= \S+ {kind}(?:-start)?\(", text)))
            }
        ),
        max((int(size) for size in _VMEM.findall(text)), default=0),
        tuple(kernels_of(traced)),
    )


def _refusal(case: Case, error: Exception) -> Refusal:
    """Which memory a program overflows, or why else the compiler doesn't take it."""
    text = str(error)
    lowered = text.lower()
    memory = "program"
    if "resource_exhausted" in lowered or "ran out of memory" in lowered or "exceed" in lowered:
        found = _USED.search(text)
        memory = found.group(2).upper() if found else "memory"
    said = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return Refusal("tpu", f"{case.name}: {memory}", said[:300])
