"""A session on an AMD GPU, in Triton's interpreter, or of torch on the host in a GPU's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import environ

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
    StepBuckets,
    StepExecutor,
    StepShape,
    VisionShape,
    Weight,
)
from ml4core.api.known_layouts import PER_TENSOR
from ml4core_rocm import switches
from ml4core_rocm.aiter_ops import arranged, with_aiter
from ml4core_rocm.buckets import step_buckets
from ml4core_rocm.capabilities import capabilities
from ml4core_rocm.executor import EagerExecutor, GraphExecutor
from ml4core_rocm.fault import FaultWord
from ml4core_rocm.graphs import HipGraphs
from ml4core_rocm.ops import load_ops
from ml4core_rocm.stages import Stages

_KEPT_FP32 = frozenset({"index_weights_proj", "gate"})
"""Matrices that the model wants in fp32 whatever the compute dtype."""

ACTS = ("fp8_block", "fp8_tensor", "mxfp4")
"""Formats in which a deployment may want the inputs of products with quantised weights."""


class RocmSession:
    """Opened for one deployment. Quantised weights stay quantised: products decode them."""

    def __init__(self, deployment: Deployment) -> None:
        self.device = deployment.device
        self._deployment = deployment
        act = next((act for act in ACTS if f"act:{act}" in deployment.needs), None)
        found, _ = switches.read(deployment, capabilities(self.device), environ)
        ours = {} if self.device.kind == "fake" else load_ops(act, found.kernel_act)
        ops, told = with_aiter(ours, deployment, found)
        self.ops: Mapping[str, Callable[..., object]] = ops
        self.switches: Mapping[str, str] = {**found.told, **told}
        self._stages = Stages(deployment)
        served = ops.get("moe_experts") is not ours.get("moe_experts")
        self._expert_mode = found.expert_act if served else ""
        if found.use_aiter:  # it takes these from the environment alone
            environ[switches.VARIABLES[switches.AR_SIZE]] = str(found.custom_ar_max_size)
            if self._expert_mode == "a8w4":
                environ["AITER_BF16_FP8_MOE_BOUND"] = "0"
        self.layouts: Mapping[str, KVLayout] = {}
        self.collectives: Collectives | None = None
        self._torch_device = torch.device(deployment.device.torch_device)
        self._dtype = getattr(torch, deployment.dtype)
        self._fault = FaultWord(self._torch_device)
        self.step_buckets: StepBuckets | None = None
        self.executor: StepExecutor = EagerExecutor()
        if self._torch_device.type == "cuda" and not deployment.enforce_eager:
            self.step_buckets = step_buckets(deployment)
            graphs = HipGraphs(self._torch_device)
            self.executor = GraphExecutor(graphs, self.step_buckets, self._fault)

    def providers(
        self, stage: str, layer: LayerSpec | None, shape: StepShape | VisionShape
    ) -> Sequence[Candidate]:
        if not isinstance(shape, StepShape):
            return ()
        return self._stages.candidates(stage, layer, shape)

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
        ready = {name: self._prepared(name, value, moved) for name, value in weights.items()}
        return arranged(ready, self._expert_mode) if self._expert_mode else ready

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
