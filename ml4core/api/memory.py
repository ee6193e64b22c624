"""What a session tells of its device's memory, by which an engine plans its start."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class MemoryFigures(NamedTuple):
    """Bytes of one device. ``total - free - held`` is what its runtime, libraries, captured graphs
    and other processes have.
    """

    total: int
    """All of the device."""
    free: int
    """What the device would give to anybody."""
    allocated: int
    """What this process's tensors take."""
    held: int
    """What this process's allocator has of the device: ``allocated``, and what it keeps for later.
    """
    peak: int
    """The most that was ``allocated`` since ``reset_peak``."""


class DeviceMemory(Protocol):
    """The memory of a device that has a fixed amount of its own. All calls wait for what the device
    has still to do, so none is made within a step.
    """

    def figures(self) -> MemoryFigures: ...

    def reset_peak(self) -> None:
        """``peak`` begins anew, from what is allocated now."""
        ...

    def release(self) -> None:
        """Gives what the allocator keeps for later back to the device."""
        ...
