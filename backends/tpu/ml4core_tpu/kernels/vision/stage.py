"""The stage ``vision_encoder`` on the host: a program for each bucket of patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import torch
from jax.sharding import Sharding
from torch import Tensor

from ml4core.api import VisionSpec, VisionWeights, Weight
from ml4core_tpu.bridge import padded, to_jax, to_torch
from ml4core_tpu.buckets import bucket_of, image_buckets
from ml4core_tpu.kernels.layer.arrays import weights_of
from ml4core_tpu.kernels.layer.form import Matrix
from ml4core_tpu.kernels.target import Target
from ml4core_tpu.kernels.vision.program import Encoder, VisionForm, vision_encoder
from ml4core_tpu.programs import IMAGES, Lower, Programs
from ml4core_tpu.progress import progress

Layer = Mapping[str, Tensor | Weight]


class VisionPrograms:
    """The encoder of a session. Its weights are laid out when it is first called: layers of one
    kind as a stack, so that a program holds one of them.
    """

    def __init__(
        self,
        spec: VisionSpec | None,
        dtype: str,
        programs: Programs,
        act: str = "",
        warm_up: bool = False,
        target: Target = "host",
        place: Sharding | None = None,
    ) -> None:
        """``spec``: None for a model without an encoder, which is never called. ``warm_up``: the
        first call compiles for images of every size. ``place``: of the device that it runs on, and
        has a copy of the weights; None: the host, on their own memory.
        """
        self._spec = spec
        self._dtype = dtype
        self._act = act
        self._programs = programs
        self._cold = warm_up
        self._target: Target = target
        self._place = place
        self._held: tuple[VisionWeights, Encoder] | None = None

    def call(
        self, weights: VisionWeights, patches: Tensor, positions: Tensor, image_ids: Tensor
    ) -> Tensor:
        """The stage's signature."""
        spec, count = self._spec, patches.shape[0]
        if spec is None:
            raise ValueError("the model has no vision encoder (ModelSpec.vision is None)")
        _check(spec, patches, positions, image_ids)
        encoder = self._encoder(weights)
        form = VisionForm(spec, self._dtype, self._act, self._target)
        sizes = image_buckets(spec)
        if self._cold:
            wanted = [_wanted(form, encoder, size, self._place) for size in sizes]
            with progress("Compiling programs of images") as told:
                self._programs.warm_up(wanted, told)
            self._cold = False
        size = bucket_of(sizes, count)
        program = self._programs.get(*_wanted(form, encoder, size, self._place))
        given = (
            to_jax(padded(patches.float(), size)),
            to_jax(padded(positions, size)),
            to_jax(padded(image_ids, size, -1)),
        )
        found = jax.block_until_ready(program(encoder, *self._placed(given)))
        if self._place is not None:
            found = jax.device_put(found, jax.local_devices(backend="cpu")[0])
        return to_torch(found, count // spec.cell_patches)

    def _placed(self, tree: Any) -> Any:
        return tree if self._place is None else jax.device_put(tree, self._place)

    def _encoder(self, weights: VisionWeights) -> Encoder:
        if self._held is None or self._held[0] is not weights:
            self._held = (weights, self._placed(encoder_of(weights)))
        return self._held[1]


def _wanted(
    form: VisionForm, encoder: Encoder, patches: int, place: Sharding | None
) -> tuple[Any, str, Lower]:
    """As ``Programs.get`` takes it."""
    shapes = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=place),
        (encoder, *inputs(form.spec, patches)),
    )
    leaves, tree = jax.tree.flatten(shapes)
    key = (form, str(tree), tuple((one.shape, one.dtype) for one in leaves))
    return key, f"{IMAGES}, {patches} patches", partial(_lowered, form, shapes)


def _lowered(form: VisionForm, shapes: tuple[Any, ...]) -> Any:
    return _program.trace(form, *shapes).lower()


def inputs(spec: VisionSpec, patches: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of patches, positions and ids."""
    return (
        jax.ShapeDtypeStruct((patches, spec.patch_dim), "float32"),
        jax.ShapeDtypeStruct((patches, 2), "int32"),
        jax.ShapeDtypeStruct((patches,), "int32"),
    )


def encoder_of(weights: VisionWeights) -> Encoder:
    """An encoder's weights: those outside of layers on the memory that they have, layers copied."""
    top = weights_of(weights.top)
    del top["first_expert"]  # of layers of the decoder
    stacks = tuple(_stacked(list(run)) for _, run in groupby(weights.layers, _kind))
    return Encoder(top, stacks)


def _kind(layer: Layer) -> list[tuple[str, object, object]]:
    """What layers of one stack have in common."""
    return [
        (name, getattr(one, "format", getattr(one, "dtype", None)), tuple(one.shape))
        for name, one in sorted(layer.items())
    ]


def _stacked(layers: Sequence[Layer]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, first in layers[0].items():
        if isinstance(first, Weight):
            each: list[Any] = [layer[name].parts for layer in layers]  # type: ignore[union-attr]
            parts = {key: to_jax(torch.stack([one[key] for one in each])) for key in first.parts}
            found[name] = Matrix(parts, first.format)
        else:
            found[name] = to_jax(torch.stack([layer[name] for layer in layers]))  # type: ignore[misc]
    return found


def _check(spec: VisionSpec, patches: Tensor, positions: Tensor, image_ids: Tensor) -> None:
    rows = patches.shape[0]
    wanted = ((rows, spec.patch_dim), (rows, 2), (rows,))
    found = (tuple(patches.shape), tuple(positions.shape), tuple(image_ids.shape))
    if found != wanted or rows % spec.cell_patches:
        raise ValueError(
            f"patches, positions, image_ids have shapes {found}; they must be [T, "
            f"{spec.patch_dim}], [T, 2] and [T], T a multiple of {spec.cell_patches}"
        )


_program = jax.jit(vision_encoder, static_argnums=0)
"""One function for all sessions, so that JAX finds again what it has traced for another."""
