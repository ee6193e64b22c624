"""The stage ``decoder_layer`` over a mesh: a program for each kind of layer and token bucket, which
all devices run at once.

What core holds of a layer's weights are their shapes: the arrays lie on the devices. Caches stay on
the host, and each device gets the pages that its step sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import torch
from jax.sharding import Mesh
from torch import Tensor

from ml4core.api import KVCache, LayerSpec, Refused, Weight
from ml4core_tpu.buckets import Buckets
from ml4core_tpu.kernels.layer.arrays import weights_of
from ml4core_tpu.kernels.layer.cuts import cut_refusals
from ml4core_tpu.kernels.layer.form import Form
from ml4core_tpu.kernels.layer.mesh import argument_specs, local_layer, mapped_layer
from ml4core_tpu.kernels.layer.placing import Placing
from ml4core_tpu.kernels.layer.stage import LayerPrograms
from ml4core_tpu.kernels.target import Target
from ml4core_tpu.programs import Programs


class MeshPrograms(LayerPrograms):
    """Layers of a session whose devices are this process's row of a mesh [data, tensor]."""

    def __init__(
        self,
        mesh: Mesh,
        by_width: bool,
        programs: Programs,
        buckets: Buckets,
        act: str = "",
        target: Target = "host",
    ) -> None:
        """``by_width``: of routed experts each rank has a part, in place of some whole ones."""
        super().__init__(programs, buckets, act, target)
        self._placing = Placing(mesh, by_width)

    @property
    def parts_of_experts(self) -> int:
        """Into which a process's experts are cut by width."""
        return self._placing.tensor if self._placing.by_width else 1

    def check(self, layer: LayerSpec, weights: Mapping[str, Tensor | Weight]) -> None:
        """Raises ``Refused`` for weights, as core gives them, that can't be cut over the ranks."""
        placing = self._placing
        if reasons := [*cut_refusals(layer, weights, placing.tensor, placing.by_width)]:
            raise Refused(reasons, what="this cut of the weights")

    def place(
        self, layer: LayerSpec, weights: Mapping[str, Tensor | Weight]
    ) -> Mapping[str, Tensor | Weight]:
        """Takes a layer's weights to the devices. In their place core gets the norms, and of all
        else tensors without memory. ``ValueError``, naming it, for one that doesn't divide.
        """
        first = layer.moe.first_expert if layer.moe else 0
        try:
            placed = self._placing.weights(weights_of(weights, first))
        except ValueError as error:
            raise ValueError(f"layer {layer.index}: {error}") from error
        held = {name: _stand_in(value) for name, value in weights.items()}
        self._weights[id(held)] = (held, placed)
        return held

    def form(self, layer: LayerSpec, latent: KVCache) -> Form:
        return super().form(local_layer(layer, self._placing.tensor), latent)

    def _run(self, program: Any, arguments: tuple[Any, ...]) -> Any:
        weights, *others = arguments
        specs = argument_specs(arguments, self._placing.by_width)[1:]
        spread = self._placing.spread(tuple(others), specs)
        return self._placing.own(jax.block_until_ready(program(weights, *spread)))

    def _lowered(self, form: Form, arguments: tuple[Any, ...]) -> Any:
        by_width = self._placing.by_width
        weights, *others = arguments
        specs = argument_specs(arguments, by_width)[1:]
        shapes = self._placing.shapes(tuple(others), specs)
        held = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding), weights
        )
        mapped = mapped_layer(form, self._placing.mesh, (held, *shapes), by_width)
        return jax.jit(mapped).trace(held, *shapes).lower()


def _stand_in(value: Tensor | Weight) -> Tensor | Weight:
    """A vector as it is; of others their format, shape and dtype."""
    if isinstance(value, Weight):
        parts = {name: part.to("meta") for name, part in value.parts.items()}
        return Weight(value.format, value.shape, parts)
    return value if value.ndim == 1 else torch.empty_like(value, device="meta")
