"""Weights, plans and caches of the host as a layer's program has them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from ml4core.api import KVCache, LayerKV, Selection, StepPlan, Weight
from ml4core_tpu.bridge import padded, to_jax, to_torch
from ml4core_tpu.gathered_pages import GatheredPages
from ml4core_tpu.kernels.layer.form import Caches, Chosen, Matrix, Step, Stored
from ml4core_tpu.kernels.positions import turns
from ml4core_tpu.kernels.rows import Rows
from ml4core_tpu.ops import INDEX_KINDS, LATENT_KINDS, scale_of
from ml4core_tpu.torch_ops import bits_of, latent_arrays

if TYPE_CHECKING:
    import jax

_UNUSED = ("experts_w13_input_scale", "experts_w2_input_scale", "inv_freq")


def weights_of(weights: Mapping[str, Tensor | Weight], first_expert: int = 0) -> dict[str, Any]:
    """A layer's weights on the memory that they have."""
    found: dict[str, Any] = {"first_expert": jnp.full(1, first_expert, jnp.int32)}
    for name, value in weights.items():
        if isinstance(value, Weight):
            parts = {key: to_jax(part) for key, part in value.parts.items()}
            found[name] = Matrix(parts, value.format)
        elif name not in _UNUSED:
            found[name] = to_jax(value)
    if (freq := weights.get("inv_freq")) is not None and not isinstance(freq, Weight):
        table = np.array(turns(freq.float().tolist()), np.int64).astype(np.int32)
        found["freq"] = jnp.asarray(table.T.copy())
    return found


def rows_of(cache: KVCache) -> Rows:
    """How the rows of a latent cache lie."""
    counts = {field.name: field.count for field in cache.layout.fields}
    kind: Any = LATENT_KINDS[cache.layout.id]
    return Rows(kind, counts["latent"], counts.get("rope", 0))


class Pages(NamedTuple):
    """What a layer's step takes of its pools. No keys: the layer has no indexer."""

    latents: GatheredPages
    keys: GatheredPages | None


def caches_of(kv: LayerKV, pages: Pages) -> Caches:
    """A layer's caches, of these pages alone."""
    kind = LATENT_KINDS[kv.latent.layout.id]
    held = pages.latents.parts([bits_of(part) for part in kv.latent.parts])
    latents = tuple(to_jax(part) for part in latent_arrays(held, kind))
    keys = None
    if pages.keys is not None and kv.index_keys is not None:
        (found,) = pages.keys.parts([bits_of(kv.index_keys.parts[0])])
        tiled = INDEX_KINDS[kv.index_keys.layout.id] == "lane33"
        keys = to_jax(found.unflatten(1, (33, 4)) if tiled else found)
    return Caches(latents, to_jax(scale_of(kv.latent)), keys)


def step_of(plan: StepPlan, rows: int, requests: int, columns: int, pages: Pages) -> Step:
    """The plan padded to this many rows, requests and columns of tables. Padding has no rows."""

    def table(name: str, gathered: GatheredPages) -> jax.Array:
        found = gathered.table(plan, name)
        out = found.new_zeros(requests, columns)
        # A page beyond what a request can have is never looked at.
        out[: found.shape[0], : found.shape[1]] = found[:, :columns]
        return to_jax(out)

    def row(values: Tensor, fill: int) -> jax.Array:
        return to_jax(padded(values.to(torch.int32), rows, fill))

    start = plan.query_start
    short = requests + 1 - start.shape[0]
    latent = pages.latents.slots(plan.slots["latent"])
    latent_table = table("latent", pages.latents)
    index, index_table = latent, latent_table
    if pages.keys is not None:
        index, index_table = pages.keys.slots(plan.slots["index"]), table("index", pages.keys)
    return Step(
        row(plan.positions, 0),
        row(plan.row_request, 0),
        to_jax(torch.cat((start, start[-1:].expand(short)))),
        row(plan.visible, 0),
        latent_table,
        index_table,
        row(latent, -1),
        row(index, -1),
    )


def chosen_of(selection: Selection, rows: int, pages: GatheredPages) -> Chosen:
    """A selection padded to this many rows, which have chosen nothing."""
    return Chosen(
        to_jax(padded(selection.positions, rows, -1)),
        to_jax(padded(selection.lens, rows)),
        to_jax(padded(pages.slots(selection.slots), rows, -1)),
        to_jax(padded(selection.has_nan, rows)),
    )


def selection_of(chosen: Chosen, rows: int, pages: GatheredPages) -> Selection:
    positions, lens, slots, has_nan = (to_torch(part, rows) for part in chosen)
    return Selection(positions, lens, pages.back(slots), has_nan)


def store(stored: Stored, plan: StepPlan, kv: LayerKV, pages: Pages) -> None:
    """Copies the pages that the plan's rows lie in from a program's arrays to the caches."""
    if stored.latents:
        _pages(kv.latent, stored.latents, pages.latents, plan.slots["latent"])
    if stored.keys is not None and kv.index_keys is not None and pages.keys is not None:
        _pages(kv.index_keys, (stored.keys,), pages.keys, plan.slots["index"])


def _pages(
    cache: KVCache, arrays: tuple[jax.Array, ...], pages: GatheredPages, slots: Tensor
) -> None:
    for part, array in zip(cache.parts, arrays, strict=True):
        held = bits_of(part)
        found = torch.from_dlpack(array).reshape(pages.size, *held.shape[1:])
        pages.written(held, found, slots)
