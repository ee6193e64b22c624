"""A session on the CPU: weights in the compute dtype, caches as torch arrays, steps run as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ml4core.api import (
    Candidate,
    Collectives,
    Deployment,
    Fault,
    KVCache,
    KVLayout,
    LayerSpec,
    StepOutput,
    StepShape,
    VisionShape,
    Weight,
)
from ml4core.compose.ops import COMPOSED
from ml4core.compose.ops.weights import decode_weight

F = TypeVar("F", bound=Callable[..., object])

_KEPT_FP32 = frozenset({"index_weights_proj", "gate"})
"""Matrices that the model wants in fp32 whatever the compute dtype."""


class EagerExecutor:
    """A step is itself."""

    def compile(
        self, step: Callable[..., StepOutput], shape: StepShape
    ) -> Callable[..., StepOutput]:
        return step

    def eager_break(self, function: F) -> F:
        return function


class CpuSession:
    """The embedded session. Quantised weights are decoded once, at load."""

    def __init__(self, deployment: Deployment) -> None:
        self.device = deployment.device
        self.ops: Mapping[str, Callable[..., object]] = COMPOSED
        self.layouts: Mapping[str, KVLayout] = {}
        self.executor = EagerExecutor()
        self.collectives: Collectives | None = None
        self._dtype = getattr(torch, deployment.dtype)

    def providers(
        self, stage: str, layer: LayerSpec | None, shape: StepShape | VisionShape
    ) -> Sequence[Candidate]:
        return ()

    def prepare_weights(
        self, weights: Mapping[str, Tensor | Weight], layer: LayerSpec | None
    ) -> Mapping[str, Tensor | Weight]:
        return {name: self._prepare(name, value) for name, value in weights.items()}

    def _prepare(self, name: str, value: Tensor | Weight) -> Tensor | Weight:
        if not isinstance(value, Weight):
            return value.to(self._dtype) if name == "embedding" else value
        dtype = torch.float32 if name in _KEPT_FP32 else self._dtype
        data = decode_weight(value, dtype)
        format = "fp32" if dtype == torch.float32 else "bf16"
        return Weight(format, value.shape, {"data": data.contiguous()})

    def alloc_kv(self, layout: KVLayout, blocks: int, block_size: int) -> KVCache:
        layout.check_block_size(block_size)
        parts = tuple(
            torch.zeros(part.shape(blocks, block_size), dtype=getattr(torch, part.dtype))
            for part in layout.parts
        )
        scaled = layout.fp8 is not None and layout.scale_rule == "one per-tensor scale"
        return KVCache(layout, block_size, parts, torch.ones(1) if scaled else None)

    def fault(self) -> Fault | None:
        return None

    def close(self) -> None:
        return None
