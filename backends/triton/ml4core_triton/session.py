"""What the sessions of the backends of GPUs have in common: weights, caches, graphs, faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ml4core.api import (
    Collectives,
    Deployment,
    DeviceMemory,
    Fault,
    KVCache,
    KVLayout,
    LayerSpec,
    ModelPart,
    StepBuckets,
    StepExecutor,
    Weight,
)
from ml4core.api.known_layouts import PER_TENSOR
from ml4core_triton.buckets import most_rows, step_buckets
from ml4core_triton.executor import EagerExecutor, GraphExecutor
from ml4core_triton.fault import FaultWord
from ml4core_triton.graphs import DeviceGraphs
from ml4core_triton.memory import device_memory

_KEPT_FP32 = frozenset({"index_weights_proj", "gate"})
"""Matrices that the model wants in fp32 whatever the compute dtype."""


class GpuSession:
    """Opened for one deployment. Quantised weights stay quantised: products decode them. A backend
    adds ``providers`` and ``switches``.
    """

    def __init__(self, deployment: Deployment, ops: Mapping[str, Callable[..., object]]) -> None:
        self.device = deployment.device
        self.ops = ops
        self.layouts: Mapping[str, KVLayout] = {}
        self.collectives: Collectives | None = None
        self.step_buckets: StepBuckets | None = None
        self.executor: StepExecutor = EagerExecutor()
        self._deployment = deployment
        self._torch_device = torch.device(deployment.device.torch_device)
        self._dtype = getattr(torch, deployment.dtype)
        self._fault = FaultWord(self._torch_device)
        self.memory: DeviceMemory | None = device_memory(self._torch_device)
        if self.device.kind == "real" and not deployment.enforce_eager:
            self.step_buckets = step_buckets(deployment)
            graphs = DeviceGraphs(self._torch_device)
            most = most_rows(deployment)
            self.executor = GraphExecutor(graphs, self.step_buckets, self._fault, most)

    def prepare_weights(
        self,
        weights: Mapping[str, Tensor | Weight],
        layer: LayerSpec | None,
        part: ModelPart = "decoder",
    ) -> Mapping[str, Tensor | Weight]:
        """Brings each weight to the device once; tied ones stay one. Plain matrices take the
        compute dtype, but for those that the model wants in fp32. Weights that are there already,
        as experts that were requantised on the device, are not copied.
        """
        moved: dict[int, Tensor] = {}
        return {name: self._prepared(name, value, moved) for name, value in weights.items()}

    def _prepared(
        self, name: str, value: Tensor | Weight, moved: dict[int, Tensor]
    ) -> Tensor | Weight:
        if not isinstance(value, Weight):
            dtype = self._dtype if name == "embedding" else value.dtype
            return self._moved(value, dtype, moved)
        if value.format not in ("fp32", "bf16"):
            parts = {key: self._moved(one, one.dtype, moved) for key, one in value.parts.items()}
            return Weight(value.format, value.shape, parts)
        dtype = torch.float32 if name in _KEPT_FP32 else self._dtype
        data = self._moved(value.data, dtype, moved)
        format = "fp32" if dtype == torch.float32 else "bf16"
        return Weight(format, value.shape, {"data": data})

    def _moved(self, value: Tensor, dtype: torch.dtype, moved: dict[int, Tensor]) -> Tensor:
        """Dense on the device; one tensor for all uses of one in this dtype."""
        known = moved.get(id(value))
        if known is None or known.dtype != dtype:
            known = value.to(device=self._torch_device, dtype=dtype).contiguous()
            moved[id(value)] = known
        return known

    def alloc_kv(self, layout: KVLayout, blocks: int, block_size: int) -> KVCache:
        layout.check_block_size(block_size)
        device = self._torch_device
        try:
            parts = tuple(
                torch.zeros(
                    part.shape(blocks, block_size), dtype=getattr(torch, part.dtype), device=device
                )
                for part in layout.parts
            )
            scaled = layout.scale_rule == PER_TENSOR
            scale = torch.ones(1, device=device) if scaled else None
        except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
            size = blocks * block_size * layout.bytes_per_token
            raise MemoryError(
                f"a {layout.role} cache of {blocks} pages of {block_size} tokens takes {size} "
                f"bytes in layout {layout.id}, and {self.device.name} doesn't give them"
            ) from error
        return KVCache(layout, block_size, parts, scale)

    def fault(self) -> Fault | None:
        return self._fault.read()

    def close(self) -> None:
        if isinstance(self.executor, GraphExecutor):
            self.executor.close()
