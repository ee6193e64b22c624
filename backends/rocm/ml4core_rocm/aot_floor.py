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

_WINDOW = 8
"""Rows that a request's window has at most: seven drafts and one."""
BANDWIDTH = 8.0e12
"""Bytes a second."""
RATES: Mapping[str, float] = MappingProxyType(
    {"fp32": 0.144e15, "bf16": 2.3e15, "fp8": 4.6e15, "mxfp4": 9.2e15}
)
"""Dense operations a second."""
UNITS, SIMDS, REGISTERS, LDS = 256, 4, 512, 160 * 1024
"""Compute units; of each: SIMDs, registers a lane, bytes of LDS."""
MOST_WAVES = 8
LATENCY = 0.8e-6
"""Seconds from a request to its bytes under load, and so of any launch; an assumption."""


@dataclass(frozen=True)
class Shape:
    """Rows of a step: so many requests, with as many rows each: one of a decode, those of a window
    that verifies drafts, or a chunk of a prompt.
    """

    requests: int
    each: int = 1

    @property
    def rows(self) -> int:
        return self.requests * self.each

    @property
    def judged(self) -> int:
        """Rows that get logits: of a prompt the last one."""
        return self.rows if self.each <= _WINDOW else self.requests

    def name(self, what: str, ranks: int) -> str:
        return f"{what}, TP {ranks}, {self}"

    def __str__(self) -> str:
        return f"{self.requests} x {self.each} rows"


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
        weights: those of ``bytes`` that are weights.
    """

    case: Case
    kernel: str
    times: int
    bytes: float
    operations: float
    unit: str
    tile_bytes: Callable[[Mapping[str, Any]], float]
    weights: float = 0.0


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
        return self.reach / self.floor

    @property
    def mark(self) -> str:
        """What stands against it; "" for a launch within twice its floor. What moves so little that
        a latency is all it takes, or two, is launch-bound.
        """
        if self.ratio <= 2:
            return ""
        return "launch-bound" if self.reach <= 2 * LATENCY else "beyond 2x"


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
    mark = f"  {found.mark}" if found.mark else ""
    return (
        f"{work.case.name:53} {work.times:5} {work.kernel:22} {one.programs:6} {found.waves:5.1f} "
        f"{work.bytes / 1e6:9.2f} {work.operations / 1e9:9.2f} {work.unit:5} "
        f"{found.floor * 1e6:9.2f} {found.reach * 1e6:9.2f} {found.ratio:5.1f}{mark}"
    )


HEAD = (
    f"{'case':53} {'times':>5} {'kernel':22} {'grid':>6} {'waves':>5} {'MB':>9} {'GOP':>9} "
    f"{'in':5} {'floor us':>9} {'reach us':>9} {'ratio':>5}"
)


@dataclass(frozen=True)
class Step:
    """Sums over the launches of one step.

    Attributes:
        floor, reach: seconds.
        weights: bytes.
    """

    lines: list[str]
    floor: float
    reach: float
    weights: float


def step(works: list[Work], found: Callable[[Work], Compiled]) -> Step:
    lines, floor, least, weights = [], 0.0, 0.0, 0.0
    for work in works:
        one = found(work)
        lines.append(line(work, one))
        each = reach(work, one)
        floor += work.times * each.floor
        least += work.times * each.reach
        weights += work.times * work.weights
    return Step(lines, floor, least, weights)
