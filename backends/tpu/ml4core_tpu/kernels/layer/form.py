"""What a layer's program is made for, and what it is given. All of it is static or an array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax

from ml4core.api import LayerSpec
from ml4core_tpu.kernels.rows import Rows
from ml4core_tpu.kernels.target import Target


@dataclass(frozen=True)
class Ranks:
    """The mesh axes that a program is mapped over; "" for one that there is not.

    Attributes:
        tensor: heads and the widths of dense parts are cut along it.
        data: each has rows of its own; experts are cut along both axes.
    """

    tensor: str = ""
    data: str = ""

    def summed(self, x: jax.Array) -> jax.Array:
        """The sum over ranks that have the same rows."""
        return lax.psum(x, self.tensor) if self.tensor else x

    def gathered(self, x: jax.Array) -> jax.Array:
        """The rows of every data rank, one after the other."""
        return lax.all_gather(x, self.data, axis=0, tiled=True) if self.data else x

    def scattered(self, x: jax.Array) -> jax.Array:
        """This rank's rows of the sum over data ranks."""
        if not self.data:
            return x
        return lax.psum_scatter(x, self.data, scatter_dimension=0, tiled=True)


ALONE = Ranks()


@dataclass(frozen=True)
class Form:
    """The static part of a layer's program: layers of one kind have equal ones.

    Attributes:
        layer: with index 0 and first expert 0, which is data; ``kv_source`` and ``topk_source`` are
            0 where it owns them, else 1.
        latents: how latent rows lie.
        act: ``fp8_tensor`` where inputs of FP8 products are quantised, else "".
    """

    layer: LayerSpec
    latents: Rows
    act: str = ""
    target: Target = "host"
    ranks: Ranks = ALONE


def form_of(layer: LayerSpec, latents: Rows, **more: Any) -> Form:
    """The form of a layer, whatever its place in the model, and whichever experts a rank has."""
    topk = None if layer.topk_source is None else int(not layer.owns_index)
    moe = None if layer.moe is None else replace(layer.moe, first_expert=0)
    alike = replace(layer, index=0, kv_source=int(not layer.owns_kv), topk_source=topk, moe=moe)
    return Form(alike, latents, **more)


@dataclass(frozen=True)
class Matrix:
    """A ``Weight`` as arrays; its format is static."""

    parts: Mapping[str, jax.Array]
    format: str = field(metadata={"static": True})

    @property
    def data(self) -> jax.Array:
        return self.parts["data"]


jax.tree_util.register_dataclass(Matrix, ["parts"], ["format"])

Weights: TypeAlias = Mapping[str, Any]
"""Arrays and ``Matrix`` by the names of ``LAYER_WEIGHTS``; ``freq`` int32 [2, R / 2] in place of
``inv_freq``; ``first_expert`` int32 [1], which is data, so that ranks run one program.
"""


class Step(NamedTuple):
    """A step's plan, padded to its token bucket T, to R requests and B pages each. All int32."""

    positions: jax.Array
    """[T]"""
    request: jax.Array
    """[T], of each row; any for rows of none."""
    query_start: jax.Array
    """[R + 1]"""
    visible: jax.Array
    """[T], 0 for padded rows."""
    latent_table: jax.Array
    """[R, B]"""
    index_table: jax.Array
    """[R, B]"""
    latent_slots: jax.Array
    """[T], -1 for padded rows."""
    index_slots: jax.Array
    """[T]"""


ROW_FIELDS = ("positions", "request", "visible", "latent_slots", "index_slots")
"""Fields of a ``Step`` with an entry a row."""


class Caches(NamedTuple):
    """The caches of a layer, as kernels have them."""

    latents: tuple[jax.Array, ...]
    scale: jax.Array
    """fp32 [1]"""
    keys: jax.Array | None
    """uint8 [pages, 33, 4, page], or fp32 [pages, page, D]. None without an indexer."""


class Chosen(NamedTuple):
    """A selection; ``ml4core.api.Selection`` says what its parts mean."""

    positions: jax.Array
    lens: jax.Array
    slots: jax.Array
    has_nan: jax.Array


class Stored(NamedTuple):
    """Arrays of the caches as a layer leaves them; none of what it doesn't write."""

    latents: tuple[jax.Array, ...]
    keys: jax.Array | None
