"""Random inputs that are the same on every machine and torch version."""

from __future__ import annotations

import math
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

FEW = 96
"""Draws of a law that are enough for gross faults."""


class Draw:
    """A stream of numbers that depends on its seed and label alone. Tensors are on the CPU.

    ``slow``: for a device on which each row takes milliseconds.
    """

    def __init__(self, seed: int, label: str = "", slow: bool = False) -> None:
        self._slow = slow
        self._bits = np.random.Generator(np.random.Philox(key=[seed, crc32(label.encode())]))

    def rows(self, wanted: int, slow: int = FEW) -> int:
        """How many draws of one law to ask for: ``slow`` where each takes long."""
        return min(wanted, slow) if self._slow else wanted

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values, rounded to ``dtype``."""
        return torch.from_numpy(self._bits.standard_normal(shape)).to(dtype)

    def uniform(
        self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Values of [low, high)."""
        return torch.from_numpy(self._bits.uniform(low, high, shape)).to(dtype)

    def integers(
        self, *shape: int, low: int = 0, high: int, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Whole numbers of [low, high)."""
        return torch.from_numpy(self._bits.integers(low, high, shape)).to(dtype)

    def permutation(self, count: int) -> Tensor:
        """[count] int64."""
        return torch.from_numpy(self._bits.permutation(count))

    def bytes(self, *shape: int) -> Tensor:
        """uint8."""
        data = np.frombuffer(self._bits.bytes(math.prod(shape)), dtype=np.uint8)
        return torch.from_numpy(data.reshape(shape).copy())
