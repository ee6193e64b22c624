"""The stage ``decoder_layer`` on torch-xla's lazy tensors: a layer's JAX program, which is one call
within the graph of its step.

Steps come in few sizes here, and caches are whole lazy tensors: nothing is padded or gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, LayerKV, LayerSpec, Selection, StepPlan, Weight
from ml4core_tpu.lazy_call import LazyCall
from ml4core_tpu.ops import INDEX_KINDS, LATENT_KINDS, scale_of
from ml4core_tpu.torch_ops import latent_arrays

Result = tuple[Tensor, Tensor | None, Selection | None]
_UNUSED = ("experts_w13_input_scale", "experts_w2_input_scale", "inv_freq")


@dataclass(frozen=True)
class _Held:
    """A layer's weights as its program takes them.

    Attributes:
        weights: core's, which this goes by.
        tensors: parts of matrices, and vectors, by name.
        formats: of the matrices.
    """

    weights: Mapping[str, Tensor | Weight]
    tensors: Mapping[str, Any]
    formats: tuple[tuple[str, str], ...]


class LazyLayers:
    """Layers of a session: those of one kind share what is lowered."""

    def __init__(self, device: torch.device, act: str = "", call: LazyCall | None = None) -> None:
        self._device = device
        self._act = act
        self._call = call or LazyCall()
        self._held: dict[int, _Held] = {}

    def place(
        self,
        layer: LayerSpec,
        given: Mapping[str, Tensor | Weight],
        prepared: Mapping[str, Tensor | Weight],
    ) -> None:
        """Takes note of a layer's weights: ``given`` on the host, ``prepared`` as lazy tensors.
        What is made of them here is data before the first step, so that all steps have one graph.
        """
        from ml4core_tpu.kernels.positions import turns

        first = layer.moe.first_expert if layer.moe else 0
        tensors: dict[str, Any] = {"first_expert": self._data(torch.tensor([first]))}
        formats = []
        for name, value in prepared.items():
            if isinstance(value, Weight):
                tensors[name] = dict(value.parts)
                formats.append((name, value.format))
            elif name not in _UNUSED:
                tensors[name] = value
        if (freq := given.get("inv_freq")) is not None and not isinstance(freq, Weight):
            tensors["freq"] = self._data(torch.tensor(turns(freq.float().tolist())).T.contiguous())
        self._held[id(prepared)] = _Held(prepared, tensors, tuple(sorted(formats)))

    def _data(self, value: Tensor) -> Tensor:
        return value.to(torch.int32).to(self._device)

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
        from ml4core_tpu.kernels.layer.arrays import rows_of
        from ml4core_tpu.kernels.layer.form import form_of

        shares = layer.topk_source is not None and not layer.owns_index
        if shares and selection is None:
            raise ValueError(f"layer {layer.index} shares a selection, and was given none")
        held = self._held.get(id(weights))
        if held is None:
            raise ValueError(f"layer {layer.index} has weights that prepare_weights gave to no one")
        keys = kv.index_keys if layer.indexer is not None else None
        form = form_of(layer, rows_of(kv.latent), act=self._act)
        given = (
            held.tensors,
            _step(plan, "latent" if keys is None else "index"),
            (_latents(kv.latent), scale_of(kv.latent), () if keys is None else (_keys(keys),)),
            residual,
            _some(hidden),
            _chosen(selection) if shares and selection else (),
            _some(next_norm),
        )
        found = self._call(
            partial(_program, form, held.formats), given, ("decoder_layer", form, held.formats)
        )
        out, normed, chosen, latents, written = found
        _store(kv.latent, latents)
        if keys is not None:
            _store(keys, written)
        return (
            out,
            normed[0] if normed else None,
            Selection(*chosen) if chosen else selection,
        )


def _program(form: Any, formats: tuple[tuple[str, str], ...], *given: Any) -> Any:
    """``decoder_layer`` of arrays as ``LazyLayers.call`` hands them over: caches are the numbers
    that they store, and what there is not is an empty tuple.
    """
    from ml4core_tpu.kernels.layer.form import Caches, Chosen, Matrix, Step
    from ml4core_tpu.kernels.layer.program import decoder_layer
    from ml4core_tpu.kernels.row_write import bits_of, numbers_of

    tensors, step, (latents, scale, keys), residual, hidden, chosen, next_norm = given
    weights = dict(tensors)
    for name, format in formats:
        weights[name] = Matrix(weights[name], format)
    caches = Caches(tuple(map(bits_of, latents)), scale, bits_of(keys[0]) if keys else None)
    out, normed, made, stored = decoder_layer(
        form,
        weights,
        Step(*step),
        caches,
        residual,
        hidden[0] if hidden else None,
        Chosen(*chosen) if chosen else None,
        next_norm[0] if next_norm else None,
    )
    kept = [numbers_of(new, old) for new, old in zip(stored.latents, latents, strict=False)]
    return (
        out,
        () if normed is None else (normed,),
        () if made is None else tuple(made),
        tuple(kept),
        () if stored.keys is None else (numbers_of(stored.keys, keys[0]),),
    )


def _some(value: Tensor | None) -> tuple[Tensor, ...]:
    return () if value is None else (value,)


def _step(plan: StepPlan, index: str) -> tuple[Tensor, ...]:
    """The fields of a ``Step``; ``index`` is the group in whose place a layer without keys has the
    latents'.
    """
    fields = (
        plan.positions,
        plan.row_request,
        plan.query_start,
        plan.visible,
        plan.block_tables["latent"],
        plan.block_tables[index],
        plan.slots["latent"],
        plan.slots[index],
    )
    return tuple(one.to(torch.int32) for one in fields)


def _chosen(selection: Selection) -> tuple[Tensor, ...]:
    numbers = (selection.positions, selection.lens, selection.slots)
    return (*(one.to(torch.int32) for one in numbers), selection.has_nan)


def _latents(cache: KVCache) -> tuple[Tensor, ...]:
    return tuple(latent_arrays(cache.parts, LATENT_KINDS[cache.layout.id]))


def _keys(cache: KVCache) -> Tensor:
    part = cache.parts[0]
    return part.unflatten(1, (33, 4)) if INDEX_KINDS[cache.layout.id] == "lane33" else part


def _store(cache: KVCache, arrays: tuple[Tensor, ...]) -> None:
    """None of a cache that the layer only reads."""
    for part, new in zip(cache.parts, arrays, strict=False):
        part.copy_(new.reshape(part.shape))
