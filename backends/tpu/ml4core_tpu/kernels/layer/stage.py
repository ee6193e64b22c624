"""The stage ``decoder_layer`` on the host: a program for each kind of layer and token bucket."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from torch import Tensor

from ml4core.api import KVCache, LayerKV, LayerSpec, Selection, StepPlan
from ml4core_tpu.bridge import padded, to_jax, to_torch
from ml4core_tpu.buckets import Buckets
from ml4core_tpu.gathered_pages import GatheredPages, seen_pages
from ml4core_tpu.kernels.layer.arrays import (
    Pages,
    caches_of,
    chosen_of,
    rows_of,
    selection_of,
    step_of,
    store,
    weights_of,
)
from ml4core_tpu.kernels.layer.form import ROW_FIELDS, Form, form_of
from ml4core_tpu.kernels.layer.program import decoder_layer
from ml4core_tpu.kernels.target import Target
from ml4core_tpu.live_requests import live_requests
from ml4core_tpu.programs import Lower, Programs

Result = tuple[Tensor, Tensor | None, Selection | None]
Request = tuple[Hashable, str, Lower]
"""A program that is wanted: as ``Programs.get`` takes it."""


class LayerPrograms:
    """Layers of a session, whatever their number: those of one kind share programs."""

    def __init__(
        self, programs: Programs, buckets: Buckets, act: str = "", target: Target = "host"
    ) -> None:
        self._programs = programs
        self._buckets = buckets
        self._act = act
        self._target: Target = target
        self._weights: dict[int, tuple[object, dict[str, Any]]] = {}

    def form(self, layer: LayerSpec, latent: KVCache) -> Form:
        return form_of(layer, rows_of(latent), act=self._act, target=self._target)

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
        """The stage's signature, bound to a layer. Writes into ``kv``."""
        rows, bucket = residual.shape[0], self._buckets.rows(residual.shape[0])
        plan = live_requests(plan, self._buckets.most_requests)
        pages = self._pages(layer, plan, kv, selection)
        arguments = self._arguments(
            layer, weights, plan, kv, residual, hidden, selection, next_norm, bucket, pages
        )
        program = self._programs.get(*self._wanted(layer, kv, arguments))
        residual_out, normed, chosen, stored = self._run(program, arguments)
        store(stored, plan, kv, pages)
        return (
            to_torch(residual_out, rows),
            None if normed is None else to_torch(normed, rows),
            selection if chosen is None else selection_of(chosen, rows, pages.latents),
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
        """The programs of a layer, one for each bucket, when it is called with such arguments.
        Their values, and how many rows there are, don't matter.
        """
        held = self._buckets.rows(plan.shape.rows)
        plan = live_requests(plan, self._buckets.most_requests)
        pages = self._pages(layer, plan, kv, selection)
        given = self._arguments(
            layer, weights, plan, kv, residual, hidden, selection, next_norm, held, pages
        )
        return [self._wanted(layer, kv, _of_rows(given, bucket)) for bucket in self._buckets.tokens]

    def _arguments(
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
        pages: Pages,
    ) -> tuple[Any, ...]:
        shares = layer.topk_source is not None and not layer.owns_index
        if shares and selection is None:
            raise ValueError(f"layer {layer.index} shares a selection, and was given none")
        requests = self._buckets.tables(plan.query_start.shape[0] - 1)
        columns = self._buckets.columns(kv.latent.blocks)
        columns = max(columns, plan.block_tables["latent"].shape[1])
        return (
            self._arrays(weights),
            step_of(plan, bucket, requests, columns, pages),
            caches_of(kv, pages),
            to_jax(padded(residual, bucket)),
            None if hidden is None else to_jax(padded(hidden, bucket)),
            chosen_of(selection, bucket, pages.latents) if shares and selection else None,
            None if next_norm is None else to_jax(next_norm),
        )

    def _pages(
        self, layer: LayerSpec, plan: StepPlan, kv: LayerKV, selection: Selection | None
    ) -> Pages:
        """What of the pools a step takes: pools of one size, whatever that of the caches is."""

        def gathered(group: str, cache: KVCache, more: Sequence[Tensor] = ()) -> GatheredPages:
            blocks, page = cache.blocks, cache.block_size
            requests, columns = plan.block_tables[group].shape
            size = self._buckets.pool(requests, columns, blocks)
            return GatheredPages.of(seen_pages(plan, group, page, blocks, more), size, blocks, page)

        chosen = () if selection is None or layer.owns_index else (selection.slots,)
        keys = kv.index_keys if layer.indexer is not None else None
        return Pages(
            gathered("latent", kv.latent, chosen), None if keys is None else gathered("index", keys)
        )

    def _arrays(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays of a layer's weights, which are kept: they share the tensors' memory."""
        known = self._weights.get(id(weights))
        if known is None or known[0] is not weights:
            known = self._weights[id(weights)] = (weights, weights_of(weights))
        return known[1]

    def _wanted(self, layer: LayerSpec, kv: LayerKV, arguments: tuple[Any, ...]) -> Request:
        form = self.form(layer, kv.latent)
        shapes, tree = jax.tree.flatten(arguments)
        key = (form, str(tree), tuple((one.shape, one.dtype) for one in shapes))
        name = f"{layer.kind}, {arguments[3].shape[0]} rows"
        return key, name, partial(self._lowered, form, arguments)

    def _run(self, program: Any, arguments: tuple[Any, ...]) -> Any:
        """What the program makes of arguments, once it is there."""
        return jax.block_until_ready(program(*arguments))

    def _lowered(self, form: Form, arguments: tuple[Any, ...]) -> Any:
        shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), arguments)
        return _program.trace(form, *shapes).lower()


def _of_rows(arguments: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """Shapes of a program's arguments, with so many rows in place of those that they have."""

    def sized(tree: Any) -> Any:
        return jax.tree.map(
            lambda one: jax.ShapeDtypeStruct((rows, *one.shape[1:]), one.dtype), tree
        )

    weights, step, caches, residual, hidden, chosen, norm = arguments
    per_row = {name: sized(getattr(step, name)) for name in ROW_FIELDS}
    step = step._replace(**per_row)
    return weights, step, caches, sized(residual), sized(hidden), sized(chosen), norm


_program = jax.jit(decoder_layer, static_argnums=0)
"""One function for all sessions, so that JAX finds again what it has traced for another."""
