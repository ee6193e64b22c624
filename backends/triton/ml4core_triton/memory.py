"""The memory of a GPU, as torch's allocator and the driver tell it."""

from __future__ import annotations

import torch

from ml4core.api import DeviceMemory, MemoryFigures


class GpuMemory:
    """Figures of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def figures(self) -> MemoryFigures:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryFigures(
            total,
            free,
            torch.cuda.memory_allocated(self._device),
            torch.cuda.memory_reserved(self._device),
            torch.cuda.max_memory_allocated(self._device),
        )

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """None where kernels run on the host."""
    return GpuMemory(device) if device.type == "cuda" else None
