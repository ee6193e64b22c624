"""What a device's memory is planned for, in numbers alone, and how far that came true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ml4core.api import MemoryFigures
from ml4core.engine.errors import RequestError

AGREES = 0.01
"""Part by which what was planned may differ from what came of it."""

UTILIZATION = "--gpu-memory-utilization"
GIB = 2**30


@dataclass(frozen=True)
class Profile:
    """What a process took of a device before there were caches, in bytes.

    Attributes:
        total: of the device.
        others: tensors of this process that were there before; they count as its share.
        weights: of the model, as they are laid out.
        activations: the most that a step had beside them, with what steps keep between them.
        runtime: what kernels and libraries took beside the allocator.
        graphs: what captured steps will take.
        available: what weights and all that comes could have had, by what the device had free
            beside the runtime.
    """

    total: int
    others: int
    weights: int
    activations: int
    runtime: int
    graphs: int
    available: int

    @property
    def beside(self) -> int:
        """All that isn't a cache."""
        return self.others + self.weights + self.activations + self.runtime + self.graphs

    def room(self, utilization: float | None) -> int:
        """Bytes for caches: of that share of the device, and of what it has; None: of that
        alone.
        """
        free = self.available - (self.weights + self.activations + self.graphs)
        if utilization is None:
            return max(0, free)
        return max(0, min(free, int(self.total * utilization) - self.beside))

    def told(self) -> str:
        """In words, for errors."""
        parts = {
            "weights": self.weights,
            "a step's activations": self.activations,
            "graphs": self.graphs,
            "kernels and libraries": self.runtime,
            "other tensors": self.others,
        }
        listed = ", ".join(f"{size_text(size)} {name}" for name, size in parts.items() if size)
        return f"of {size_text(self.total)} the process needs {listed}"


def available(figures: MemoryFigures) -> int:
    """What this process could still allocate."""
    return figures.free + figures.held - figures.allocated


def beside_tensors(figures: MemoryFigures) -> int:
    """What is in use and isn't tensors': the runtime, libraries, graphs, other processes."""
    return figures.total - figures.free - figures.allocated


def check_share(figures: MemoryFigures, utilization: float) -> None:
    """Raises ``RequestError`` if the device has less than this share for the process."""
    share, have = int(figures.total * utilization), available(figures) + figures.allocated
    if have < share:
        most = int(1000 * have / figures.total) / 1000
        raise RequestError(
            UTILIZATION,
            utilization,
            f"at most {most:g}: that share of {size_text(figures.total)} is {size_text(share)}, "
            f"and {size_text(have)} are free; or end what else has memory of the device",
        )


@dataclass(frozen=True)
class Account:
    """A plan against what came of it, both in bytes by name."""

    planned: Mapping[str, int]
    real: Mapping[str, int]

    def off(self, name: str) -> float:
        """By which part of it the real figure differs from the planned one."""
        return abs(self.real[name] - self.planned[name]) / max(1, self.planned[name])

    @property
    def off_in_all(self) -> float:
        planned, real = sum(self.planned.values()), sum(self.real.values())
        return abs(real - planned) / max(1, planned)

    def warnings(self) -> list[str]:
        """What differs by more than ``AGREES``: the caches, or all together."""
        found = []
        if self.off("pools") > AGREES:
            found.append(
                f"caches took {self.real['pools']} bytes where {self.planned['pools']} were "
                f"planned, {100 * self.off('pools'):.1f}% off"
            )
        if self.off_in_all > AGREES:
            each = ", ".join(
                f"{name} {self.planned[name]} -> {self.real[name]}"
                for name in self.planned
                if self.off(name) > AGREES
            )
            found.append(
                f"the device's memory differs from the plan by {100 * self.off_in_all:.1f}% "
                f"(planned -> taken, bytes: {each})"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        names = {
            name: {"planned": self.planned[name], "taken": self.real[name]} for name in self.planned
        }
        planned, real = sum(self.planned.values()), sum(self.real.values())
        return names | {
            "in_all": {
                "planned": planned,
                "taken": real,
                "off_percent": round(100 * self.off_in_all, 3),
            },
            "agrees": not self.warnings(),
        }


def size_text(nbytes: int) -> str:
    """For people."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"
