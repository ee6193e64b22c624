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
from ml4core_tpu.kernels.layer.program import decoder_layer

DATA, TENSOR = "data", "tensor"
RANKS = Ranks(tensor=TENSOR, data=DATA)

_ROWS = frozenset({"wq", "wq_b", "shared_w13", "dense_w13"})
"""Cut along rows: heads, or the inner widths of each rank, gate over up."""
_COLUMNS = frozenset({"wo", "shared_w2", "dense_w2"})
_HEADS = frozenset({"w_uk", "w_uv", "ssmax_scale", "ssmax_bias"})
_EXPERTS = frozenset({"experts_w13", "experts_w2", "first_expert"})


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


def weight_specs(weights: Mapping[str, Any]) -> dict[str, Any]:
    """How each weight lies on the mesh."""

    def spec(name: str, value: Any) -> Any:
        if name in _EXPERTS:
            place = PartitionSpec((DATA, TENSOR))
        elif name in _HEADS or name in _ROWS:
            place = PartitionSpec(TENSOR)
        elif name in _COLUMNS:
            place = PartitionSpec(None, TENSOR)
        else:
            place = PartitionSpec()
        if not isinstance(value, Matrix):
            return place
        # A scale of a whole matrix has no axis to be cut.
        parts: dict[str, Any] = {
            key: place if part.ndim else PartitionSpec() for key, part in value.parts.items()
        }
        return Matrix(parts, value.format)

    return {name: spec(name, value) for name, value in weights.items()}


def argument_specs(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """How the arguments of ``decoder_layer`` behind the form lie on the mesh: those of all data
    ranks one after the other.
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
        weight_specs(weights),
        each(step),
        placed,
        each(residual),
        each(hidden),
        each(chosen),
        everywhere,
    )


def mapped_layer(form: Form, mesh: Mesh, arguments: tuple[Any, ...]) -> Callable[..., Any]:
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
        in_specs=argument_specs(arguments),
        out_specs=found,
        check_vma=False,
    )


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


def ranked_rows(weight: Any, tensor: int) -> Any:
    """Rows [..., 2 I, n] of gate over up, as ``tensor`` ranks have them one after the other: each
    its part of the gate over its part of up.
    """
    halves = weight.reshape(*weight.shape[:-2], 2, tensor, -1, weight.shape[-1])
    return halves.swapaxes(-4, -3).reshape(weight.shape)


def joined_steps(steps: list[Step]) -> Step:
    """The steps of all data ranks as one, each field one after the other."""
    return Step(
        *(np.concatenate([np.asarray(one) for one in field]) for field in zip(*steps, strict=True))
    )
