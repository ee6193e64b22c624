"""The stage ``decoder_layer`` with all that it takes on devices: weights, caches, rows and what was
selected. A layer's program is donated the caches that it writes, so that a step changes them in
place; nothing waits for another layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import torch
from torch import Tensor

from ml4core.api import KVCache, LayerKV, LayerSpec, Selection, StepPlan, Weight
from ml4core_tpu.bridge import padded, to_jax
from ml4core_tpu.buckets import Buckets
from ml4core_tpu.kernels.layer.form import ROW_FIELDS, Caches, Chosen, Form, Step, Stored
from ml4core_tpu.kernels.layer.mesh import donated, donating_layer
from ml4core_tpu.kernels.layer.mesh_stage import MeshPrograms
from ml4core_tpu.kernels.layer.stage import Request, Result
from ml4core_tpu.kernels.resident.devices import ROWS, WHOLE, Devices
from ml4core_tpu.kernels.resident.tensor import DeviceTensor, host_of, rows_tensor
from ml4core_tpu.live_requests import live_requests
from ml4core_tpu.ops import scale_of
from ml4core_tpu.programs import Programs

TRIAL_PAGES = 2
"""Of caches that an engine only tries its largest steps on: the null page and another."""


class ResidentLayers(MeshPrograms):
    """Layers of a session whose caches are those of ``resident_cache``."""

    def __init__(
        self, devices: Devices, by_width: bool, programs: Programs, buckets: Buckets, act: str = ""
    ) -> None:
        """``by_width``: of routed experts each rank has a part, in place of some whole ones."""
        super().__init__(devices.mesh, by_width, programs, buckets, act, devices.target)
        self.devices = devices
        self._by_width = by_width
        self._vectors: dict[int, tuple[Tensor, jax.Array]] = {}
        self._scales: dict[float, jax.Array] = {}
        self._plans: dict[tuple[int, int], tuple[StepPlan, Step]] | None = None

    def place(
        self, layer: LayerSpec, weights: Mapping[str, Tensor | Weight]
    ) -> Mapping[str, Tensor | Weight]:
        """On one device nothing is cut: so core gets what lies there, which ops read, too."""
        held = super().place(layer, weights)
        if self.devices.mesh.size > 1:
            return held
        _, placed = self._weights.pop(id(held))

        def tensor(array: jax.Array, like: Tensor) -> Tensor:
            return DeviceTensor(array, self.devices, tuple(like.shape), like.dtype)

        def on_device(name: str, value: Tensor | Weight) -> Tensor | Weight:
            if isinstance(value, Weight):
                arrays = placed[name].parts
                parts = {key: tensor(arrays[key], part) for key, part in value.parts.items()}
                return Weight(value.format, value.shape, parts)
            return value if value.ndim == 1 or name not in placed else tensor(placed[name], value)

        found = {name: on_device(name, value) for name, value in weights.items()}
        self._weights[id(found)] = (found, placed)
        return found

    @contextmanager
    def step(self) -> Iterator[None]:
        """While a step runs: its plan goes to the devices once, and not for each layer."""
        self._plans = {}
        try:
            yield
        finally:
            self._plans = None

    def call(
        self,
        layer: LayerSpec,
        weights: Mapping[str, Any],
        plan: StepPlan,
        kv: LayerKV,
        residual: Tensor,
        hidden: Tensor | None,
        selection: Selection | None,
        next_norm: Tensor | None,
    ) -> Result:
        rows = residual.shape[0]
        bucket = self._bucket(rows, kv)
        given = (layer, weights, plan, kv, residual, hidden, selection, next_norm)
        arguments = self._taken(*given, bucket=bucket)
        program = self._programs.get(*self._asked(layer, kv, arguments))
        residual_out, normed, chosen, stored = program(*donated(layer, arguments))
        _keep(kv, stored)

        def tensor(array: jax.Array) -> Tensor:
            return rows_tensor(array, self.devices, rows)

        return (
            tensor(residual_out),
            None if normed is None else tensor(normed),
            selection if chosen is None else Selection(*map(tensor, chosen)),
        )

    def wanted(
        self,
        layer: LayerSpec,
        weights: Mapping[str, Any],
        plan: StepPlan,
        kv: LayerKV,
        residual: Tensor,
        hidden: Tensor | None,
        selection: Selection | None,
        next_norm: Tensor,
    ) -> list[Request]:
        held = self._buckets.rows(plan.shape.rows)
        given = (layer, weights, plan, kv, residual, hidden, selection, next_norm)
        arguments = self._taken(*given, bucket=held)
        each = [_of_rows(arguments, held, bucket) for bucket in self._buckets.tokens]
        return [self._asked(layer, kv, one) for one in each]

    def _bucket(self, rows: int, kv: LayerKV) -> int:
        """Steps that are only tried have one size: what is compiled for trials serves no others."""
        found = self._buckets.rows(rows)
        trial = kv.latent.blocks <= TRIAL_PAGES
        return max(found, self._buckets.tokens[-1]) if trial else found

    def _taken(
        self,
        layer: LayerSpec,
        weights: Mapping[str, Any],
        plan: StepPlan,
        kv: LayerKV,
        residual: Tensor,
        hidden: Tensor | None,
        selection: Selection | None,
        next_norm: Tensor | None,
        bucket: int,
    ) -> tuple[Any, ...]:
        """Arguments of ``mapped_layer``, on the devices."""
        shares = layer.topk_source is not None and not layer.owns_index
        if shares and selection is None:
            raise ValueError(f"layer {layer.index} shares a selection, and was given none")
        keys = kv.index_keys if layer.indexer is not None else None
        caches = Caches(
            _arrays(kv.latent),
            self._scale(kv.latent),
            None if keys is None else _arrays(keys)[0],
        )
        chosen = None
        if shares and selection is not None:
            parts = zip(selection, (-1, 0, -1, 0), strict=True)
            chosen = Chosen(*(self._rows(part, bucket, fill) for part, fill in parts))
        return (
            self._arrays(weights),
            self._step(plan, bucket, kv.latent.blocks),
            caches,
            self._rows(residual, bucket),
            None if hidden is None else self._rows(hidden, bucket),
            chosen,
            None if next_norm is None else self._vector(next_norm),
        )

    def _rows(self, tensor: Tensor, bucket: int, fill: float = 0) -> jax.Array:
        if isinstance(tensor, DeviceTensor):
            if tensor.array.shape[0] == self.devices.data * bucket:
                return tensor.array
            tensor = host_of(tensor)
        spread: jax.Array = self._placing.spread(to_jax(padded(tensor, bucket, fill)), ROWS)
        return spread

    def _vector(self, tensor: Tensor) -> jax.Array:
        """A weight, which goes to the devices once."""
        known = self._vectors.get(id(tensor))
        if known is None:
            array = self._placing.spread(to_jax(host_of(tensor)), WHOLE)
            known = self._vectors[id(tensor)] = (tensor, array)
        return known[1]

    def _scale(self, cache: KVCache) -> jax.Array:
        value = host_of(scale_of(cache)).numpy().item()  # torch's own item would count as a wait
        if value not in self._scales:
            self._scales[value] = self._placing.spread(to_jax(torch.tensor([value])), WHOLE)
        return self._scales[value]

    def _step(self, plan: StepPlan, bucket: int, blocks: int) -> Step:
        if self._plans is None:
            return self._planned(plan, bucket, blocks)
        key = (id(plan), bucket)
        if key not in self._plans:
            self._plans[key] = (plan, self._planned(plan, bucket, blocks))
        return self._plans[key][1]

    def _planned(self, plan: StepPlan, bucket: int, blocks: int) -> Step:
        """The plan padded to the bucket, to all requests and to all pages that one can have."""
        plan = live_requests(plan, self._buckets.most_requests)
        requests = self._buckets.tables(plan.query_start.shape[0] - 1)
        latent = plan.block_tables["latent"]
        columns = max(self._buckets.columns(blocks), latent.shape[1])

        def row(values: Tensor, fill: int) -> Tensor:
            return padded(values.to(torch.int32), bucket, fill)

        def table(group: str) -> Tensor:
            found = plan.block_tables.get(group, latent)
            out = found.new_zeros(requests, columns)
            out[: found.shape[0], : found.shape[1]] = found
            return out

        start, slots = plan.query_start, plan.slots
        more = start[-1:].expand(requests + 1 - start.shape[0])
        tensors = (
            row(plan.positions, 0),
            row(plan.row_request, 0),
            torch.cat((start, more)),
            row(plan.visible, 0),
            table("latent"),
            table("index"),
            row(slots["latent"], -1),
            row(slots.get("index", slots["latent"]), -1),
        )
        arrays = Step(*map(to_jax, tensors))
        specs: Any = (ROWS,) * len(arrays)
        placed: Step = self._placing.spread(arrays, Step(*specs))
        return placed

    def _asked(self, layer: LayerSpec, kv: LayerKV, arguments: tuple[Any, ...]) -> Request:
        form = self.form(layer, kv.latent)
        shapes, tree = jax.tree.flatten(arguments)
        key = (form, str(tree), tuple((one.shape, one.dtype) for one in shapes))
        name = f"{layer.kind}, {arguments[3].shape[0] // self.devices.data} rows"
        return key, name, partial(self._lowered, form, arguments)

    def _lowered(self, form: Form, arguments: tuple[Any, ...]) -> Any:
        shapes = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=one.sharding), arguments
        )
        program = donating_layer(form, self.devices.mesh, shapes, self._by_width)
        return program.trace(*donated(form.layer, shapes)).lower()


def _arrays(cache: KVCache) -> tuple[jax.Array, ...]:
    lying = [part for part in cache.parts if not isinstance(part, DeviceTensor)]
    if lying:
        raise ValueError(
            f"a cache of {cache.layout.id!r} lies on the host; layers take those that the "
            "session's alloc_kv made"
        )
    return tuple(part.array for part in cache.parts)  # type: ignore[attr-defined]


def _keep(kv: LayerKV, stored: Stored) -> None:
    """The arrays of the caches from now on: those that the program was donated are gone."""
    if stored.latents:
        for part, array in zip(kv.latent.parts, stored.latents, strict=True):
            part.array = array  # type: ignore[attr-defined]
    if stored.keys is not None and kv.index_keys is not None:
        kv.index_keys.parts[0].array = stored.keys  # type: ignore[attr-defined]


def _of_rows(arguments: tuple[Any, ...], held: int, rows: int) -> tuple[Any, ...]:
    """Shapes of a program's arguments, with ``rows`` in place of the ``held`` that they have."""

    def sized(tree: Any) -> Any:
        return jax.tree.map(
            lambda one: jax.ShapeDtypeStruct(
                (one.shape[0] // held * rows, *one.shape[1:]), one.dtype, sharding=one.sharding
            ),
            tree,
        )

    weights, step, caches, residual, hidden, chosen, norm = arguments
    step = step._replace(**{name: sized(getattr(step, name)) for name in ROW_FIELDS})
    return weights, step, caches, sized(residual), sized(hidden), sized(chosen), norm
