"""A session on an NVIDIA GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
from ml4core_cuda.buckets import step_buckets
from ml4core_cuda.executor import EagerExecutor, GraphExecutor
from ml4core_cuda.fault import FaultWord
from ml4core_cuda.ffn_stage import wanted_act
from ml4core_cuda.graphs import CudaGraphs
from ml4core_cuda.latency import WORD, wanted
from ml4core_cuda.ops import load_ops
from ml4core_cuda.providers import PEERS
from ml4core_cuda.stages import KERNELS, candidates
from ml4core_cuda.tuned import told

_KEPT_FP32 = frozenset({"index_weights_proj", "gate"})
"""Matrices that the model wants in fp32 whatever the compute dtype."""


class CudaSession:
    """Opened for one deployment. Quantised weights stay quantised: products decode them."""

    def __init__(self, deployment: Deployment) -> None:
        self.device = deployment.device
        self._deployment = deployment
        self.ops: Mapping[str, Callable[..., object]] = load_ops(
            wanted_act(deployment), deployment.device.name
        )
        self.layouts: Mapping[str, KVLayout] = {}
        self.collectives: Collectives | None = None
        self.step_buckets: StepBuckets | None = None
        self._torch_device = torch.device(deployment.device.torch_device)
        self._dtype = getattr(torch, deployment.dtype)
        self._fault = FaultWord(self._torch_device)
        self.executor: StepExecutor = EagerExecutor()
        if self._torch_device.type == "cuda" and not deployment.enforce_eager:
            self.step_buckets = step_buckets(deployment)
            graphs = CudaGraphs(self._torch_device)
            self.executor = GraphExecutor(graphs, self.step_buckets, self._fault)

    def providers(
        self, stage: str, layer: LayerSpec | None, shape: StepShape | VisionShape
    ) -> Sequence[Candidate]:
        if not isinstance(shape, StepShape):
            return ()
        return candidates(stage, layer, shape, self._deployment)

    def prepare_weights(
        self,
        weights: Mapping[str, Tensor | Weight],
        layer: LayerSpec | None,
        part: ModelPart = "decoder",
    ) -> Mapping[str, Tensor | Weight]:
        """Brings each weight to the device once; tied ones stay one. Plain matrices take the
        compute dtype, but for those that the model wants in fp32.
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
        """A dense copy on the device; one for all uses of a tensor in this dtype."""
        known = moved.get(id(value))
        if known is None or known.dtype != dtype:
            known = torch.empty(value.shape, dtype=dtype, device=self._torch_device)
            known.copy_(value)
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

    @property
    def switches(self) -> Mapping[str, str]:
        """What is in force here, for the start-up report."""
        told_of = [name for names in KERNELS.values() for name in names]
        found = {"decode_backend": WORD if wanted(self._deployment) else "standard"}
        if self._torch_device.type == "cuda":
            told_now = told(self.device.name, told_of) or (f"measured on {self.device.name}",)
            found["sizes"] = "; ".join(told_now)
        if self.step_buckets is not None:
            sizes = len(self.step_buckets.decode) * len(self.step_buckets.pages)
            found["graphs"] = f"captured as steps first come twice, of up to {sizes} decode sizes"
        return found

    @property
    def clock(self) -> Callable[[Sequence[Callable[[], object]], int], Sequence[float]] | None:
        """Times calls as a step runs them, in a graph; seconds of one call, for each repeat. None
        in the interpreter.
        """
        if self._torch_device.type != "cuda":
            return None
        from ml4core_cuda.measure.timing import Timer

        timer = Timer(str(self._torch_device))
        return lambda calls, repeats: [us * 1e-6 for us in timer.spans(calls, repeats)]

    @property
    def peers(self) -> Mapping[str, Mapping[str, Callable[..., object]]]:
        """By op, by name, the same work by the libraries that are here, to be timed beside ours."""
        from ml4core_cuda.kernels import deep_gemm, flash_mla, flashinfer

        served: dict[str, tuple[str, Callable[..., object]]] = {
            "FlashMLA": ("sparse_mla", flash_mla.sparse_mla),
            "FlashInfer": ("topk", flashinfer.top_k),
            "DeepGEMM": ("gemm", deep_gemm.product),
        }
        found: dict[str, dict[str, Callable[..., object]]] = {}
        for peer in PEERS:
            if self._torch_device.type == "cuda" and not peer.absent():
                op, call = served[peer.name]
                found.setdefault(op, {})[peer.name] = call
        return found

    def fault(self) -> Fault | None:
        return self._fault.read()

    def close(self) -> None:
        if isinstance(self.executor, GraphExecutor):
            self.executor.close()
