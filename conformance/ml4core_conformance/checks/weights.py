"""Weights in each format that a checkpoint may have, and what laying them out takes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ml4core.api import LayerSpec, ModelSpec, Weight
from ml4core_conformance import tiny
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.quantize import QUANTIZERS
from ml4core_conformance.rigs.passes import made_case, run_steps, smooth
from ml4core_conformance.rigs.rig import DEFAULT, Rig
from ml4core_conformance.subject import Subject

QUANTIZED = ("fp8_block", "fp8_tensor", "nvfp4", "mxfp4")


_EXPERTS = ("experts_w13", "experts_w2")


_MATRICES = (*_EXPERTS, "wq", "wkv_a", "wo", "shared_w13", "shared_w2", "dense_w13", "dense_w2")


def checks() -> list[Check]:
    found = [
        Check(
            "model.weights",
            "model",
            partial(weights, format),
            "A model whose matrices are in this format has the logits of the same numbers decoded.",
            variant=format,
            requires=frozenset({f"weights:{format}"}),
            unit="model/weights",
        )
        for format in QUANTIZED
    ]
    found.append(
        Check(
            "model.load_memory",
            "model",
            load_memory,
            "Once a layer is laid out, nothing of what was read for it stays alive but what the "
            "session serves from: memory peaks at the model plus one layer.",
            unit="model/weights",
        )
    )
    return found


def weights(format: str, subject: Subject) -> None:
    for seed in subject.seeds:
        spec = smooth()
        dtype = getattr(torch, DEFAULT.settled(subject)["dtype"])
        dense = tiny.weights(spec, seed, dtype)
        given = tuple(_quantized(layer, format) for layer in dense.layers)
        rig = Rig(
            subject,
            spec,
            replace(dense, layers=given),
            DEFAULT,
            weight_formats=frozenset({format}),
            needs=frozenset({f"weights:{format}"}),
        )
        case = made_case(rig, seed, 24)
        request = rig.book().request(case.ids, rig.block_size)
        got = run_steps(rig, request, [16, *[1] * 8])
        case.judge(f"weights in {format}", got, request)


def _quantized(layer: tiny.Weights, format: str) -> tiny.Weights:
    """The layer with its matrices in a format: those of four bits hold experts only."""
    names = () if not format else _MATRICES if format.startswith("fp8") else _EXPERTS
    return {
        name: _packed(value, format) if name in names and isinstance(value, Weight) else value
        for name, value in layer.items()
    }


def _packed(weight: Weight, format: str) -> Weight:
    parts = QUANTIZERS[format](weight.data.double().numpy(), None)
    tensors = {name: torch.from_numpy(part.copy()) for name, part in parts.items()}
    return Weight(format, weight.shape, tensors)


def load_memory(subject: Subject) -> None:
    spec = tiny.model()
    dtype = getattr(torch, DEFAULT.settled(subject)["dtype"])
    # A format that a session may lay out anew, if it declares one.
    format = next((f for f in QUANTIZED if f"weights:{f}" in subject.capabilities), "")
    formats = frozenset({format} if format else ())
    needs = frozenset(f"weights:{name}" for name in formats)
    fields = DEFAULT.settled(subject)
    session = subject.open(subject.deployment(spec, **fields, weight_formats=formats, needs=needs))
    kept = []
    for layer, given in _stream(spec, dtype, format):
        refs = [weakref.ref(tensor) for tensor in _tensors(given)]
        spaces = {tensor.untyped_storage().data_ptr() for tensor in _tensors(given)}
        prepared = session.prepare_weights(given, layer)
        kept.append(prepared)
        del given
        gc.collect()
        served = {tensor.untyped_storage().data_ptr() for tensor in _tensors(prepared)}
        alive = sum(
            tensor.untyped_storage().nbytes()
            for ref in refs
            if (tensor := ref()) is not None
            and tensor.untyped_storage().data_ptr() in spaces - served
        )
        if alive:
            name = "outside of the layers" if layer is None else f"of layer {layer.index}"
            raise CheckFailed(
                f"{alive} bytes that were read {name} stay alive after prepare_weights, and the "
                "session serves from other memory"
            )


def _stream(
    spec: ModelSpec, dtype: torch.dtype, format: str
) -> Iterator[tuple[LayerSpec | None, tiny.Weights]]:
    """Each layer's weights, made when they are asked for, as a loader reads them. No name of ours
    keeps them alive.
    """
    draw = Draw(0, "stream")
    yield None, dict(tiny.weights(replace(spec, layers=()), 0, dtype).top)
    for layer in spec.layers:
        yield layer, _quantized(tiny.layer_weights(layer, draw, dtype), format)


def _tensors(weights: Mapping[str, Tensor | Weight]) -> Iterator[Tensor]:
    for value in weights.values():
        yield from value.parts.values() if isinstance(value, Weight) else (value,)
