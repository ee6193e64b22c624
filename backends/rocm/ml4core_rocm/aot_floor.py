"""How near a compiled kernel can come to what the memory and the matrix units allow.

From published figures of an MI350X, the compiled code and counts of bytes: nothing here is
measured. The floor is the greater of bytes over bandwidth and operations over the matrix rate. What
a launch can reach is bounded by what it keeps in flight: bytes on their way are those of the tiles
that its resident programs have asked for, and each takes the memory's latency to come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ml4core_rocm.aot import Compiled
from ml4core_triton.aot import Case

BANDWIDTH = 8.0e12
"""Bytes a second."""
RATES: Mapping[str, float] = MappingProxyType({"bf16": 2.3e15, "fp8": 4.6e15, "mxfp4": 9.2e15})
"""Dense operations a second."""
UNITS, SIMDS, REGISTERS, LDS = 256, 4, 512, 160 * 1024
"""Compute units; of each: SIMDs, registers a lane, bytes of LDS."""
MOST_WAVES = 8
LATENCY = 0.8e-6
"""Seconds from a request to its bytes under load; an assumption."""


@dataclass(frozen=True)
class Work:
    """What one launch of a kernel has to do at a shape of the model.

    Attributes:
        case: that makes it; others of its launches don't count.
        kernel: name of the launch.
        times: launches in a step of the model.
        bytes: that have to come from memory or go there.
        operations: of the matrix units, in ``unit``.
        tile_bytes: what a program asks for before it waits, of what a launch says of its tile.
    """

    case: Case
    kernel: str
    times: int
    bytes: float
    operations: float
    unit: str
    tile_bytes: Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True)
class Reach:
    """A launch beside its floor; times in seconds.

    Attributes:
        waves: resident waves of a SIMD.
        floor: of bytes and operations.
        reach: the least time that its bytes in flight allow, at least the floor and one latency.
    """

    waves: float
    floor: float
    reach: float

    @property
    def ratio(self) -> float:
        """Beside the floor, or one latency where all that it moves is less than that."""
        return self.reach / max(self.floor, LATENCY)


def resident(one: Compiled) -> int:
    """Programs of a compute unit at a time, by registers and by LDS."""
    waves = min(MOST_WAVES, REGISTERS // max(8, -(-one.vgprs // 8) * 8))
    by_registers = waves * SIMDS // one.warps
    return min(by_registers, LDS // one.lds_bytes if one.lds_bytes else by_registers)


def reach(work: Work, one: Compiled) -> Reach:
    programs = resident(one)
    floor = max(work.bytes / BANDWIDTH, work.operations / RATES[work.unit])
    ahead = max(1, one.stages - 1)
    flying = min(one.programs, programs * UNITS) * work.tile_bytes(one.tile) * ahead
    least = work.bytes * LATENCY / flying if flying else 0.0
    return Reach(programs * one.warps / SIMDS, floor, max(floor, least, LATENCY))


def line(work: Work, one: Compiled) -> str:
    found = reach(work, one)
    mark = "  beyond 2x" if found.ratio > 2 else ""
    return (
        f"{work.case.name:44} {work.kernel:22} {one.programs:6} {found.waves:5.1f} "
        f"{work.bytes / 1e6:9.2f} {work.operations / 1e9:9.2f} {work.unit:5} "
        f"{found.floor * 1e6:9.2f} {found.reach * 1e6:9.2f} {found.ratio:5.1f}{mark}"
    )


HEAD = (
    f"{'case':44} {'kernel':22} {'grid':>6} {'waves':>5} {'MB':>9} {'GOP':>9} {'in':5} "
    f"{'floor us':>9} {'reach us':>9} {'ratio':>5}"
)


def steps(works: list[Work], found: Callable[[Work], Compiled]) -> tuple[list[str], float, float]:
    """Lines of the kernels of one step, and the sums of their floors and reaches, in seconds."""
    lines, floor, least = [], 0.0, 0.0
    for work in works:
        one = found(work)
        lines.append(line(work, one))
        each = reach(work, one)
        floor += work.times * each.floor
        least += work.times * each.reach
    return lines, floor, least
