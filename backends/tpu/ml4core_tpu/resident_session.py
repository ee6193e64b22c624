"""A session whose weights, caches and rows stay on devices: the session of TPUs. On the host's
virtual devices, with kernels that XLA interprets, it opens by ``tpu.resident``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from ml4core.api import Deployment, KVCache, KVLayout, LayerSpec, ModelPart, Weight
from ml4core_tpu.buckets import Buckets, buckets_of
from ml4core_tpu.compilation import warms_up
from ml4core_tpu.device_memory import told_memory, told_when_full
from ml4core_tpu.mesh_runtime import open_mesh, spans, target_of
from ml4core_tpu.ops import act_of
from ml4core_tpu.programs import Programs
from ml4core_tpu.resident_executor import ResidentExecutor
from ml4core_tpu.session import TpuSession

if TYPE_CHECKING:
    from ml4core_tpu.kernels.layer.stage import LayerPrograms
    from ml4core_tpu.kernels.resident.stage import ResidentLayers
    from ml4core_tpu.kernels.vision.stage import VisionPrograms

_COMPOSED = frozenset({"w_uk", "w_uv"})
"""Matrices of each head, which no op of this backend reads: core's composition does, on the host.
"""


class ResidentSession(TpuSession):
    """What core is handed are ``DeviceTensor``s: rows between layers, caches and matrices. Vectors,
    the embedding, plans and results are tensors of the host.
    """

    _executor = ResidentExecutor

    def _started(self, deployment: Deployment) -> Mapping[str, Callable[..., object]]:
        mesh = open_mesh(deployment)  # starts JAX
        from ml4core_tpu.kernels.resident.devices import Devices
        from ml4core_tpu.kernels.resident.ops import ResidentOps

        self._devices = Devices(mesh, target_of(deployment))
        if (memory := told_memory(self._devices.own)) is not None:
            self.memory = memory
        pages = buckets_of(deployment).pages
        return ResidentOps(self._devices, act_of(deployment), pages).by_name

    def _told(self) -> dict[str, str]:
        kind = self._devices.own[0].device_kind
        told = {
            "devices": f"{len(self._devices.own)} of {kind}, kernels for {self._devices.target}"
        }
        return told | (super()._told() if spans(self._deployment) else {})

    def _programs_of_layers(self, programs: Programs, buckets: Buckets) -> LayerPrograms:
        from ml4core_tpu.kernels.resident.stage import ResidentLayers

        by_width, act = not self._deployment.enable_expert_parallel, act_of(self._deployment)
        layers: ResidentLayers = ResidentLayers(self._devices, by_width, programs, buckets, act)
        self._mesh = layers
        return layers

    def _programs_of_images(self, programs: Programs) -> VisionPrograms:
        from ml4core_tpu.kernels.vision.stage import VisionPrograms

        asked = self._deployment
        spec = None if asked.model is None else asked.model.vision
        devices = self._devices
        return VisionPrograms(
            spec,
            asked.dtype,
            programs,
            act_of(asked),
            warms_up(asked),
            devices.target,
            devices.first,
        )

    def prepare_weights(
        self,
        weights: Mapping[str, Tensor | Weight],
        layer: LayerSpec | None,
        part: ModelPart = "decoder",
    ) -> Mapping[str, Tensor | Weight]:
        prepared = super().prepare_weights(weights, layer, part)
        placed = part == "decoder" and layer is not None and self._mesh is not None
        if placed or part == "vision":
            return prepared
        return {name: self._held(name, value) for name, value in prepared.items()}

    def _held(self, name: str, value: Tensor | Weight) -> Tensor | Weight:
        if not isinstance(value, Weight) or name in _COMPOSED:
            return value
        from ml4core_tpu.kernels.resident.caches import resident_weight

        return resident_weight(value, self._devices, cut=name == "output")

    def alloc_kv(self, layout: KVLayout, blocks: int, block_size: int) -> KVCache:
        from ml4core_tpu.kernels.resident.caches import resident_cache

        layout.check_block_size(block_size)
        size = blocks * block_size * layout.bytes_per_token
        text = (
            f"a {layout.role} cache of {blocks} pages of {block_size} tokens takes {size} bytes in "
            f"layout {layout.id}, and {self.device.name} doesn't give them"
        )
        with told_when_full(text):
            return resident_cache(layout, blocks, block_size, self._devices)
