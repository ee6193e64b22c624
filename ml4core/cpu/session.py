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
    ModelPart,
    StepOutput,
    StepShape,
    VisionShape,
    Weight,
)
from ml4core.api.known_layouts import PER_TENSOR
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
        self,
        weights: Mapping[str, Tensor | Weight],
        layer: LayerSpec | None,
        part: ModelPart = "decoder",
    ) -> Mapping[str, Tensor | Weight]:
        output = weights.get("output")
        tied = isinstance(output, Weight) and output.data is weights.get("embedding")
        prepared = {
            name: self._prepare(name, value)
            for name, value in weights.items()
            if not (tied and name == "output")
        }
        if tied:  # one copy for both, also where it is brought to another dtype
            table = prepared["embedding"]
            prepared["output"] = _plain(table if isinstance(table, Tensor) else table.data)
        return prepared

    def _prepare(self, name: str, value: Tensor | Weight) -> Tensor | Weight:
        if not isinstance(value, Weight):
            return value.to(self._dtype) if name == "embedding" else value
        dtype = torch.float32 if name in _KEPT_FP32 else self._dtype
        return _plain(_decoded(value, dtype))

    def alloc_kv(self, layout: KVLayout, blocks: int, block_size: int) -> KVCache:
        layout.check_block_size(block_size)
        try:
            parts = tuple(
                torch.zeros(part.shape(blocks, block_size), dtype=getattr(torch, part.dtype))
                for part in layout.parts
            )
        except RuntimeError as error:  # what torch raises where the host has too little memory
            size = blocks * block_size * layout.bytes_per_token
            raise MemoryError(
                f"a {layout.role} cache of {blocks} pages of {block_size} tokens takes {size} "
                f"bytes in layout {layout.id}, and the host doesn't give them"
            ) from error
        scaled = layout.scale_rule == PER_TENSOR
        return KVCache(layout, block_size, parts, torch.ones(1) if scaled else None)

    def fault(self) -> Fault | None:
        return None

    def close(self) -> None:
        return None


def _plain(data: Tensor) -> Weight:
    format = "fp32" if data.dtype == torch.float32 else "bf16"
    return Weight(format, tuple(data.shape), {"data": data})


def _decoded(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values. A stack is decoded matrix by matrix: the temporaries of a whole one would be
    larger than its layer.

    Matrices of fp32 [..., N, K] lie in memory as [..., K, N]: most products of one
    row with the transpose of such a one are faster, down to 3/5 of the time; others change little.
    """
    *stack, rows, columns = weight.shape
    if dtype != torch.float32:
        if not stack or weight.format == "bf16":
            return decode_weight(weight, dtype).contiguous()
        data = torch.empty(weight.shape, dtype=dtype)
    else:
        data = torch.empty(*stack, columns, rows, dtype=dtype).transpose(-1, -2)
    if not stack:
        return data.copy_(decode_weight(weight, dtype))
    for index in range(stack[0]):
        parts = {name: part[index] for name, part in weight.parts.items()}
        data[index] = decode_weight(Weight(weight.format, weight.shape[1:], parts), dtype)
    return data
