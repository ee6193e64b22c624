"""A session on the host, with kernels that XLA interprets. Layers are programs, and the rest is
composed by core. Under torch-xla a step is one graph, in which the programs are calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ml4core.api import (
    Accepted,
    Candidate,
    Collectives,
    Deployment,
    Fault,
    KVCache,
    KVLayout,
    LayerSpec,
    ModelPart,
    Rejected,
    StepBuckets,
    StepExecutor,
    StepShape,
    VisionShape,
    Weight,
)
from ml4core.api.known_layouts import PER_TENSOR
from ml4core_tpu.bridge import host_environment
from ml4core_tpu.buckets import Buckets, buckets_of
from ml4core_tpu.compilation import Told, compilation_cache, release_programs, warms_up
from ml4core_tpu.executor import BucketExecutor, EagerExecutor
from ml4core_tpu.expert_weights import packed_by_width
from ml4core_tpu.layer_choice import IMAGES, PROVIDER, eager_refusals, layer_refusals
from ml4core_tpu.layouts import layouts_for
from ml4core_tpu.mesh_runtime import leave, open_mesh, spans, told_mesh
from ml4core_tpu.ops import act_of, ops_for
from ml4core_tpu.product_ops import GROUPS
from ml4core_tpu.programs import Programs
from ml4core_tpu.release import release
from ml4core_tpu.runtimes import LAZY

if TYPE_CHECKING:
    from ml4core_tpu.kernels.layer.mesh_stage import MeshPrograms
    from ml4core_tpu.kernels.layer.stage import LayerPrograms
    from ml4core_tpu.kernels.vision.stage import VisionPrograms
    from ml4core_tpu.lazy_layers import LazyLayers

_KEPT_FP32 = frozenset({"index_weights_proj", "gate"})
"""Matrices that the model wants in fp32 whatever the compute dtype."""


_EXPERTS: Mapping[str, int] = MappingProxyType({"experts_w13": 2, "experts_w2": 1})
"""Stacks of experts, and the matrices that lie in each: gate and up, or one."""


class TpuSession:
    """Opened for one deployment. Quantised weights stay quantised: products decode them."""

    _executor: type[BucketExecutor] = BucketExecutor

    def __init__(self, deployment: Deployment, runtime: str) -> None:
        self.device = deployment.device
        self.ops: Mapping[str, Callable[..., object]] = self._started(deployment)
        self.layouts: Mapping[str, KVLayout] = layouts_for(deployment.model)
        self.collectives: Collectives | None = None
        self.step_buckets: StepBuckets | None = None
        self.executor: StepExecutor = EagerExecutor()
        self._torch_device = torch.device(deployment.device.torch_device)
        self._dtype = getattr(torch, deployment.dtype)
        self._deployment = deployment
        self._layers: LayerPrograms | LazyLayers | None = None
        self._lazy_layers: LazyLayers | None = None
        self._mesh: MeshPrograms | None = None
        self._images: VisionPrograms | None = None
        self.switches: Mapping[str, str] = MappingProxyType({"runtime": runtime, **self._told()})
        if runtime == LAZY:
            self._lazy()
        elif not deployment.enforce_eager:
            self._compiled(runtime)

    def _started(self, deployment: Deployment) -> Mapping[str, Callable[..., object]]:
        """Has JAX find its devices; the session's ops."""
        host_environment()
        return ops_for(deployment)

    def _lazy(self) -> None:
        """Steps become graphs of torch-xla."""
        from ml4core_tpu.lazy_layers import LazyLayers
        from ml4core_tpu.lazy_steps import LazyExecutor, lazy_buckets, lazy_device

        self._torch_device = lazy_device()
        if not self._deployment.enforce_eager:
            self._lazy_layers = LazyLayers(self._torch_device, act_of(self._deployment))
            self._images = self._programs_of_images(Programs())
        self._layers = self._lazy_layers
        self.step_buckets = lazy_buckets(self._deployment)
        self.executor = LazyExecutor(self._torch_device)

    def _compiled(self, runtime: str) -> None:
        """Layers become programs, on one device or on a mesh of them."""
        compilation_cache(self._deployment)
        buckets, programs = buckets_of(self._deployment), Programs()
        self._layers = layers = self._programs_of_layers(programs, buckets)
        self._images = self._programs_of_images(programs)
        self.step_buckets = StepBuckets(logits=buckets.requests)
        self.executor = self._executor(
            self._deployment.model,
            self._dtype,
            layers,
            programs,
            buckets,
            self.ops["gemm"],
            warms_up(self._deployment),
        )
        told = {"runtime": runtime, **self._told()}
        self.switches = Told(told, buckets, programs)

    def _told(self) -> dict[str, str]:
        """More for the start-up report."""
        return {} if self._mesh is None else {"mesh": told_mesh(self._deployment)}

    def _programs_of_layers(self, programs: Programs, buckets: Buckets) -> LayerPrograms:
        act = act_of(self._deployment)
        if not spans(self._deployment):
            from ml4core_tpu.kernels.layer.stage import LayerPrograms

            return LayerPrograms(programs, buckets, act)
        mesh, by_width = open_mesh(self._deployment), not self._deployment.enable_expert_parallel
        from ml4core_tpu.kernels.layer.mesh_stage import MeshPrograms

        self._mesh = MeshPrograms(mesh, by_width, programs, buckets, act)
        return self._mesh

    def _programs_of_images(self, programs: Programs) -> VisionPrograms:
        """On the host's own arrays, whatever the runtime; on a mesh each host runs all of it."""
        from ml4core_tpu.kernels.vision.stage import VisionPrograms

        asked = self._deployment
        spec = None if asked.model is None else asked.model.vision
        return VisionPrograms(spec, asked.dtype, programs, act_of(asked), warms_up(asked))

    def providers(
        self, stage: str, layer: LayerSpec | None, shape: StepShape | VisionShape
    ) -> Sequence[Candidate]:
        if stage == "vision_encoder":
            return self._of_images()
        if stage != "decoder_layer" or layer is None:
            return ()
        reasons = layer_refusals(self._deployment)
        if reasons or self._layers is None:
            return (Rejected(PROVIDER, reasons),)
        return (Accepted(PROVIDER, partial(self._layers.call, layer), release()),)

    def _of_images(self) -> Sequence[Candidate]:
        if self._images is None:
            return (Rejected(PROVIDER, eager_refusals(self._deployment, IMAGES)),)
        return (Accepted(PROVIDER, self._images.call, release()),)

    def prepare_weights(
        self,
        weights: Mapping[str, Tensor | Weight],
        layer: LayerSpec | None,
        part: ModelPart = "decoder",
    ) -> Mapping[str, Tensor | Weight]:
        """Brings each weight to the device once; tied ones stay one. Plain matrices take the
        compute dtype, but for those that the model wants in fp32. Those of the decoder's layers are
        cut over the devices of a mesh; ``Refused`` where a cut would go through a block.
        """
        mesh = self._mesh if part == "decoder" else None
        if mesh is not None and layer is not None:
            mesh.check(layer, weights)
        parts = 1 if mesh is None else mesh.parts_of_experts
        weights = {name: _packed(name, value, parts) for name, value in weights.items()}
        # The encoder of images is called with tensors of the host, whatever the runtime.
        host = torch.device(self.device.torch_device)
        copies = _Copies(host if part == "vision" else self._torch_device)
        prepared = {name: self._prepared(name, value, copies) for name, value in weights.items()}
        if self._lazy_layers is not None and layer is not None and part == "decoder":
            self._lazy_layers.place(layer, weights, prepared)
        return prepared if mesh is None or layer is None else mesh.place(layer, prepared)

    def _prepared(self, name: str, value: Tensor | Weight, copies: _Copies) -> Tensor | Weight:
        if not isinstance(value, Weight):
            dtype = self._dtype if name == "embedding" else value.dtype
            return copies.of(value, dtype)
        if value.format not in ("fp32", "bf16"):
            parts = {key: copies.of(one, one.dtype) for key, one in value.parts.items()}
            return Weight(value.format, value.shape, parts)
        dtype = torch.float32 if name in _KEPT_FP32 else self._dtype
        format = "fp32" if dtype == torch.float32 else "bf16"
        return Weight(format, value.shape, {"data": copies.of(value.data, dtype)})

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
        except RuntimeError as error:  # what torch raises where the host has too little memory
            size = blocks * block_size * layout.bytes_per_token
            raise MemoryError(
                f"a {layout.role} cache of {blocks} pages of {block_size} tokens takes {size} "
                f"bytes in layout {layout.id}, and {self.device.name} doesn't give them"
            ) from error
        return KVCache(layout, block_size, parts, scale)

    def fault(self) -> Fault | None:
        return None

    def close(self) -> None:
        self._layers = self._mesh = self._lazy_layers = self._images = None
        release_programs()
        if self._deployment.data_parallel_size > 1:
            leave()


class _Copies:
    """Dense copies on a device; one for all uses of a tensor in a dtype."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, Tensor] = {}

    def of(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        known = self._made.get(id(value))
        if known is None or known.dtype != dtype:
            known = torch.empty(value.shape, dtype=dtype, device=self._device)
            known.copy_(value)
            self._made[id(value)] = known
        return known


def _packed(name: str, value: Tensor | Weight, ranks: int) -> Tensor | Weight:
    """FP4 experts as their kernel reads them, in parts of so many ranks; anything else as it is."""
    if isinstance(value, Weight) and name in _EXPERTS and value.format in GROUPS:
        return packed_by_width(value, _EXPERTS[name], ranks)
    return value
