"""One kernel at one shape: its inputs, what judges it, what it is compared with, and its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, KVLayout, Weight

BF16_RATE, FP8_RATE = 741e12, 1255e12
"""Of one H200, on large products."""

Inputs = tuple[Any, ...]
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Work:
    """Work that a kernel does.

    Attributes:
        part: a word by which works are chosen.
        make: inputs of a seed on a device; on ``meta`` they have no data.
        call: the kernel on them.
        error: how wrong a result is, for what is allowed: right up to 1. None: only timed.
        nbytes: the fewest bytes that the work moves; 0 if not told.
        flops: operations of the matrix units; 0 if not told.
        target: what is aimed at, in words, as in ``docs/performance.md``.
        target_us: the same as a time, where it is one; 0 else.
        peers: by name, the same work by others.
        tuned: kernel, shape and candidates of each of its tilings that is worth a search.
        rate: operations a second that the matrix units were measured at: of bf16, or of FP8.
    """

    name: str
    part: str
    make: Callable[[int, torch.device], Inputs]
    call: Callable[..., Any]
    error: Callable[[Inputs, Any], float] | None = None
    nbytes: int = 0
    flops: int = 0
    target: str = ""
    target_us: float = 0.0
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    tuned: Sequence[tuple[str, str, tuple[Sizes, ...]]] = ()
    rate: float = BF16_RATE


class Draw:
    """Random tensors of a seed; on ``meta``, shapes alone."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self._generator = None if device.type == "meta" else torch.Generator(device)
        if self._generator is not None:
            self._generator.manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if self._generator is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.randn(
            shape, generator=self._generator, device=self.device, dtype=torch.float32
        ).to(dtype)

    def bf16(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers times ``scale``."""
        if self._generator is None:
            return self.normal(*shape, dtype=torch.bfloat16)
        found = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return found.normal_(0.0, scale, generator=self._generator)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        if self._generator is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.randint(
            high, shape, generator=self._generator, device=self.device, dtype=dtype
        )

    def choices(self, high: int, rows: int, count: int, dtype: torch.dtype) -> Tensor:
        """[rows, count] of numbers below ``high``, each once a row."""
        if self._generator is None:
            return torch.empty(rows, count, dtype=dtype, device=self.device)
        found = [
            torch.randperm(high, generator=self._generator, device=self.device)[:count]
            for _ in range(min(rows, 64))
        ]
        return torch.stack(found).repeat(-(-rows // len(found)), 1)[:rows].to(dtype)

    def full(self, value: float, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def count(self, rows: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.arange(rows, dtype=dtype, device=self.device)

    def cache(self, layout: KVLayout, blocks: int, block_size: int) -> KVCache:
        """Pages of normal rows."""
        scale = None
        if self._generator is None:
            parts = tuple(
                torch.empty(
                    one.shape(blocks, block_size),
                    dtype=getattr(torch, one.dtype),
                    device=self.device,
                )
                for one in layout.parts
            )
        else:
            parts = layout.pack(self.normal(blocks, block_size, layout.width), scale)
        return KVCache(layout, block_size, parts, scale)

    def weight(self, format: str, *shape: int) -> Weight:
        """A matrix [.., N, K] of numbers of about K^-0.5, made as it is stored: any byte of data is
        a number but NaN.
        """
        *stack, rows, columns = shape
        size = columns**-0.5
        if format in ("bf16", "fp32"):
            dtype = torch.bfloat16 if format == "bf16" else torch.float32
            data = self.bf16(*shape, scale=size).to(dtype)
            return Weight(format, shape, {"data": data})
        if format in ("fp8_block", "fp8_tensor"):
            data = self._codes(*shape)
            # Codes are of about 2**0 by their exponents; scales differ by a factor of two.
            blocks = (*stack, -(-rows // 128), -(-columns // 128))
            scale = self.normal(*(blocks if format == "fp8_block" else tuple(stack)))
            scale = scale.abs().clamp(0.5, 1.0) * size
            return Weight(format, shape, {"data": data, "scale": scale})
        data = self.integers(256, *stack, rows, columns // 2, dtype=torch.uint8)
        if format == "nvfp4":
            scale = 0x30 + self.integers(16, *stack, rows, columns // 16, dtype=torch.uint8)
            whole = self.normal(*stack, rows).abs().clamp(0.5, 1.0) * size
            return Weight(format, shape, {"data": data, "scale": scale, "global_scale": whole})
        scale = self.integers(3, *stack, rows, columns // 32, dtype=torch.uint8)
        scale = scale + (126 - int(columns).bit_length() // 2)
        return Weight(format, shape, {"data": data, "scale": scale})

    def _codes(self, *shape: int) -> Tensor:
        """e4m3fn bytes of numbers between 2**-4 and 2, of both signs."""
        if self._generator is None:
            return torch.empty(shape, dtype=torch.uint8, device=self.device)
        found = torch.empty(shape, dtype=torch.uint8, device=self.device)
        flat = found.view(-1)
        for start in range(0, flat.numel(), 1 << 30):  # what the draw needs beside it
            part = flat[start : start + (1 << 30)]
            part.random_(24, 64, generator=self._generator)
            sign = torch.empty_like(part).random_(0, 2, generator=self._generator)
            part.bitwise_or_(sign << 7)
        return found
