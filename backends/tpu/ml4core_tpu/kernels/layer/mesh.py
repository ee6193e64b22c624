"""A layer's program over a mesh: tensor ranks within a host, data ranks over hosts, experts over
all.

Every device runs one program. What differs between ranks is data: its rows and pages, its part of
the weights, and the number of its first expert. Rows of a step are those of its data rank, so all
ranks take the same token bucket; one without requests runs rows of padding along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ml4core.api import LayerSpec
from ml4core_tpu.kernels.fp8_matmul import wide_matmul
from ml4core_tpu.kernels.layer.form import Caches, Chosen, Form, Matrix, Ranks, Step, Stored
from ml4core_tpu.kernels.layer.products import PACKED
from ml4core_tpu.kernels.layer.program import decoder_layer

DATA, TENSOR = "data", "tensor"
RANKS = Ranks(tensor=TENSOR, data=DATA)

BOTH = (DATA, TENSOR)

_ROWS = frozenset({"wq", "wq_b", "shared_w13", "dense_w13"})
"""Cut along rows: heads, or the inner widths of each rank, gate over up."""
_COLUMNS = frozenset({"wo", "shared_w2", "dense_w2"})
_HEADS = frozenset({"w_uk", "w_uv", "ssmax_scale", "ssmax_bias"})
EXPERTS = frozenset({"experts_w13", "experts_w2"})
GATED = frozenset({"shared_w13", "dense_w13", "experts_w13"})
"""Rows of gate over up."""


def mesh_of(devices: list[Any], data: int, tensor: int) -> Mesh:
    """Devices as [data, tensor], those of one process side by side. ``ValueError`` if there are
    others than ``data * tensor`` of them.
    """
    if len(devices) != data * tensor:
        raise ValueError(
            f"{data} data ranks of {tensor} tensor ranks are {data * tensor} devices; there are "
            f"{len(devices)}"
        )
    placed = sorted(devices, key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(placed, dtype=object).reshape(data, tensor), (DATA, TENSOR))


def local_layer(layer: LayerSpec, tensor: int) -> LayerSpec:
    """The layer as one of ``tensor`` ranks has it. ``ValueError`` if heads don't divide."""
    if layer.heads % tensor:
        raise ValueError(f"{layer.heads} heads don't divide into {tensor} tensor ranks")
    return replace(layer, heads=layer.heads // tensor)


def weight_specs(weights: Mapping[str, Any], by_width: bool = False) -> dict[str, Any]:
    """How each weight lies on the mesh. Experts are cut over all ranks: whole ones, or
    ``by_width`` each of them.
    """

    def spec(name: str, value: Any) -> Any:
        if not isinstance(value, Matrix):
            if name == "first_expert":
                return PartitionSpec(BOTH)
            return PartitionSpec(TENSOR) if name in _HEADS else PartitionSpec()
        packed = value.format.startswith(PACKED)
        axis, over = cut_of(name, packed, by_width)

        def part_spec(key: str, part: Any) -> PartitionSpec:
            # A scale of a whole matrix, or of its rows, has no axis to be cut along columns.
            whole = axis >= part.ndim or (key == "row_scale" and axis == 1)
            return PartitionSpec() if whole or not over else PartitionSpec(*[None] * axis, over)

        parts: dict[str, Any] = {key: part_spec(key, part) for key, part in value.parts.items()}
        return Matrix(parts, value.format)

    return {name: spec(name, value) for name, value in weights.items()}


def cut_of(name: str, packed: bool, by_width: bool) -> tuple[int, Any]:
    """The axis along which parts of a matrix are cut, and over which axes of the mesh, if any.
    ``packed``: of experts that lie as their kernel reads them.
    """
    if name in EXPERTS:
        if not by_width:
            return 0, BOTH
        # What is packed lies transposed.
        return (2 if packed == (name == "experts_w13") else 1), BOTH
    if name in _ROWS or name in _HEADS:
        return 0, TENSOR
    return (1, TENSOR) if name in _COLUMNS else (0, None)


def argument_specs(arguments: tuple[Any, ...], by_width: bool = False) -> tuple[Any, ...]:
    """How the arguments of ``decoder_layer`` behind the form lie on the mesh: those of all data
    ranks one after the other. ``by_width`` as for ``weight_specs``.
    """
    weights, step, caches, residual, hidden, chosen, norm = arguments
    # Specs stand where the arrays do, in the same trees.
    rows: Any = PartitionSpec(DATA)
    whole: Any = PartitionSpec()

    def each(tree: Any) -> Any:
        return jax.tree.map(lambda _: rows, tree)

    placed = Caches(each(caches.latents), whole, each(caches.keys))
    everywhere = None if norm is None else whole
    return (
        weight_specs(weights, by_width),
        each(step),
        placed,
        each(residual),
        each(hidden),
        each(chosen),
        everywhere,
    )


def mapped_layer(
    form: Form, mesh: Mesh, arguments: tuple[Any, ...], by_width: bool = False
) -> Callable[..., Any]:
    """``decoder_layer`` over the mesh, of arguments of this structure. ``form`` is a rank's own."""
    rows: Any = PartitionSpec(DATA)
    layer = form.layer
    latents = tuple(rows for _ in arguments[2].latents) if layer.owns_kv else ()
    found: tuple[Any, ...] = (
        rows,
        None if arguments[6] is None else rows,
        Chosen(rows, rows, rows, rows) if layer.owns_index else None,
        Stored(latents, rows if layer.indexer else None),
    )
    return jax.shard_map(
        partial(decoder_layer, replace(form, ranks=RANKS)),
        mesh=mesh,
        in_specs=argument_specs(arguments, by_width),
        out_specs=found,
        check_vma=False,
    )


def donating_layer(
    form: Form, mesh: Mesh, arguments: tuple[Any, ...], by_width: bool = False
) -> Any:
    """``mapped_layer``, jitted, with the caches as ``cut_caches`` gives them, in two arguments. It
    is donated those that it writes: they are written in place, and what was handed over is gone.
    """
    mapped = mapped_layer(form, mesh, arguments, by_width)

    def layer(weights: Any, step: Step, written: Stored, read: Caches, *others: Any) -> Any:
        caches = Caches(
            written.latents or read.latents,
            read.scale,
            read.keys if written.keys is None else written.keys,
        )
        return mapped(weights, step, caches, *others)

    return jax.jit(layer, donate_argnums=2)


def cut_caches(layer: LayerSpec, caches: Caches) -> tuple[Stored, Caches]:
    """Those of its caches that a layer writes, and the others."""
    owns, has_keys = layer.owns_kv, layer.indexer is not None
    written = Stored(caches.latents if owns else (), caches.keys if has_keys else None)
    read = Caches(() if owns else caches.latents, caches.scale, None if has_keys else caches.keys)
    return written, read


def donated(layer: LayerSpec, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of ``mapped_layer``, or their specs, as those of ``donating_layer``."""
    weights, step, caches, *others = arguments
    return (weights, step, *cut_caches(layer, caches), *others)


def end_specs() -> tuple[PartitionSpec, ...]:
    """How arguments of ``mapped_ends`` lie: tokens of the vocabulary over tensor ranks."""
    cut, rows = PartitionSpec(TENSOR), PartitionSpec(DATA)
    return cut, cut, rows, rows, rows


def mapped_ends(mesh: Mesh) -> Callable[..., Any]:
    """What stands around a step's layers: embeddings [T, H] of token ids int32 [T] by a table
    [vocab, H], and logits fp32 [J, vocab] of rows int32 [J] of the last layer's states [T, H] by an
    output [vocab, H].
    """

    def ends(
        table: jax.Array, output: jax.Array, ids: jax.Array, states: jax.Array, rows: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        local = ids - lax.axis_index(TENSOR) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        found = jnp.where(mine[:, None], table[jnp.clip(local, 0, table.shape[0] - 1)], 0)
        logits = wide_matmul(states[rows], output, out_dtype=jnp.dtype(jnp.float32))
        gathered = lax.all_gather(logits, TENSOR, axis=1, tiled=True)
        return lax.psum(found, TENSOR), gathered

    rows = PartitionSpec(DATA)
    return jax.shard_map(
        ends, mesh=mesh, in_specs=end_specs(), out_specs=(rows, rows), check_vma=False
    )


def ranked_rows(weight: Any, tensor: int, axis: int = -2) -> Any:
    """Rows of gate over up along ``axis``, as ``tensor`` ranks have them one after the other: each
    its part of the gate over its part of up. ``ValueError`` if they don't divide.
    """
    axis %= weight.ndim
    rows = weight.shape[axis]
    if rows % (2 * tensor):
        raise ValueError(f"{rows} rows of gate over up don't divide into {tensor} tensor ranks")
    before, after = weight.shape[:axis], weight.shape[axis + 1 :]
    halves = weight.reshape(*before, 2, tensor, rows // (2 * tensor), *after)
    return halves.swapaxes(axis, axis + 1).reshape(weight.shape)


def joined_steps(steps: list[Step]) -> Step:
    """The steps of all data ranks as one, each field one after the other."""
    return Step(
        *(np.concatenate([np.asarray(one) for one in field]) for field in zip(*steps, strict=True))
    )
