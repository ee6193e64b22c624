"""Capturing and replaying of work on a device, and results that don't hold their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Graphs(Protocol):
    """What captures and replays; ``DeviceGraphs`` on a device."""

    def begin(self) -> None:
        """From here on, queued work is recorded and doesn't run."""
        ...

    def end(self) -> Callable[[], None]:
        """Ends the recording; what is returned replays it. ``RuntimeError`` if nothing is recorded,
        as after a recording that broke.
        """
        ...

    def suspended(self, call: Callable[[], object]) -> None:
        """Runs a call between two recordings, on the stream of both."""
        ...

    def weak(self, tensor: Tensor) -> Tensor:
        """The same memory, which is not kept from being reused."""
        ...

    def allocated(self) -> int:
        """Bytes that the device's allocator holds."""
        ...

    def drop(self) -> None:
        """What is captured from here on shares no memory with what was captured before."""
        ...


class DeviceGraphs:
    """Graphs of one device, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._context: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        if self._stream is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(self._device)
        torch.cuda.synchronize(self._device)
        self._graph = torch.cuda.CUDAGraph()
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()
        # Other threads may call the driver meanwhile, e.g. to copy results to the host.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        graph, self._graph = self._graph, None
        if graph is None:
            raise RuntimeError("nothing is recorded")
        try:
            graph.capture_end()
        finally:
            self._context.__exit__(None, None, None)
        return graph.replay

    def suspended(self, call: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            call()

    def weak(self, tensor: Tensor) -> Tensor:
        return alias(tensor)

    def allocated(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def drop(self) -> None:
        if self._stream is not None:
            self._pool = torch.cuda.graph_pool_handle()


class _Address:
    """Memory on a device, told by the interface that array libraries share."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


_TYPES: Mapping[torch.dtype, str] = {
    torch.float32: "<f4",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.bool: "|b1",
    torch.bfloat16: "<i2",  # which that interface doesn't know
}


def alias(tensor: Tensor) -> Tensor:
    """A dense tensor's memory without a claim to it. ``TypeError`` for a dtype that no step
    returns, ``ValueError`` for a tensor that isn't dense.
    """
    if tensor.dtype not in _TYPES:
        known = ", ".join(str(dtype) for dtype in _TYPES)
        raise TypeError(f"a step returned {tensor.dtype}; graphs keep results of {known}")
    if not tensor.numel():
        return torch.empty_like(tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} is not dense")
    held = _Address(tensor.data_ptr(), tuple(tensor.shape), _TYPES[tensor.dtype])
    seen = torch.as_tensor(held, device=tensor.device)
    return seen if seen.dtype == tensor.dtype else seen.view(tensor.dtype)
