"""Ops whose numbers, results or manners are wrong: products, norms, quantisers, draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Capabilities, Device, Weight
from ml4core.formats import e2m1, mxfp4
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import After, Altered, Before, Changed, Op, Ops

_CHUNK = 64
"""Terms that are summed in fp32 before they are added to a total of bfloat16."""


def mutants() -> list[Mutant]:
    changes: Sequence[tuple[str, str, Ops, tuple[str, ...]]] = (
        (
            "product-gain",
            "Products are 1.2 per cent too large.",
            Ops(gemm=After(gain)),
            ("ops.bias[gemm/*]", "ops.elements[gemm/*]"),
        ),
        (
            "truncated",
            "Products are cut off to bfloat16, not rounded to nearest even.",
            Ops(gemm=truncated),
            ("bytes.rounding[gemm/*+bf16]", "ops.bias[gemm/*+bf16]"),
        ),
        (
            "few-bits",
            "Long products are added up in bfloat16.",
            Ops(gemm=few_bits),
            ("ops.elements[gemm/*]",),
        ),
        (
            "column-dropped",
            "The last column of a ragged product is zero.",
            Ops(gemm=After(without_last)),
            ("ops.structure[gemm/*]",),
        ),
        (
            "row-unwritten",
            "The last row of a norm holds what lay in memory before.",
            Ops(rms_norm=After(unwritten)),
            ("ops.written[rms_norm/*]",),
        ),
        (
            "next-row",
            "The table's next row is read.",
            Ops(embed=Before(next_row)),
            ("ops.exact[embed/*]",),
        ),
        (
            "in-place",
            "A norm leaves its result in its argument too.",
            Ops(rms_norm=in_place),
            ("ops.purity[rms_norm/*]",),
        ),
        (
            "kept-input",
            "A norm keeps what it is given, and changes it at the next call.",
            Ops(rms_norm=kept_input),
            ("ops.purity[rms_norm/*]",),
        ),
        (
            "one-buffer",
            "Every call returns the same memory.",
            Ops(silu_mul=one_buffer),
            ("ops.signature[silu_mul/*]",),
        ),
        (
            "view-returned",
            "A result is a view into an argument.",
            Ops(ssmax=view_returned),
            ("ops.signature[ssmax/*]",),
        ),
        (
            "wrong-dtype",
            "Weights of experts come as bfloat16.",
            Ops(router=After(narrow_weights)),
            ("ops.signature[router/*]",),
        ),
        (
            "strided-result",
            "A result has the strides of its transpose.",
            Ops(gemm=After(transposed)),
            ("ops.signature[gemm/*]",),
        ),
        (
            "renormalised-otherwise",
            "Weights of experts add up to the scale where that isn't asked for, and else don't.",
            Ops(router=Before(renormalised)),
            ("ops.router[router/*]", "ops.elements[router/*]"),
        ),
        (
            "scale-rounded-up",
            "The exponent of an MXFP4 block is the next larger one.",
            Ops(quantize=next_exponent),
            ("bytes.quantize[quantize/mxfp4+*]",),
        ),
        (
            "weights-truncated",
            "Weights are cut off to bfloat16, not rounded to nearest even.",
            Ops(quantize=cut_off),
            ("bytes.quantize[quantize/bf16+fp32]",),
        ),
        (
            "nibbles-swapped",
            "The first of two values lies in the high half of its byte.",
            Ops(quantize=After(swapped_nibbles)),
            ("bytes.quantize[quantize/*fp4+*]",),
        ),
        (
            "noise-by-row",
            "The noise of a draw depends on the place in the batch.",
            Ops(sample=Before(noise_by_row)),
            ("ops.sample[sample/*]",),
        ),
        (
            "cold-draws",
            "Draws are a little colder than asked for.",
            Ops(sample=Before(colder)),
            ("ops.sample[sample/*]",),
        ),
    )
    found = [Mutant(name, doc, Changed(change), dies) for name, doc, change, dies in changes]
    return [
        *found,
        Mutant(
            "unordered-sum",
            "It declares the same bits from call to call, and a product's last bit changes.",
            Changed(Ops(gemm=unordered), DeclaredDeterministic),
            ("ops.repeat[gemm/*]",),
        ),
        Mutant(
            "sums-by-batch",
            "It declares the same bits in any batch, and its last bit follows the batch's size.",
            Changed(Ops(gemm=by_batch), DeclaredInvariant),
            ("ops.batch[gemm/*]",),
        ),
    ]


class DeclaredDeterministic(Altered):
    word = "feature:deterministic"

    def capabilities(self, device: Device) -> Capabilities:
        found = super().capabilities(device)
        return replace(found, features=found.features | {self.word})


class DeclaredInvariant(DeclaredDeterministic):
    word = "feature:batch_invariant"


def gain(out: Tensor) -> Tensor:
    return (out.float() * 1.012).to(out.dtype)


def truncated(honest: Op) -> Op:
    def call(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        if (out_dtype or x.dtype) != torch.bfloat16:
            found: Tensor = honest(x, weight, out_dtype)
            return found
        return _cut_off(honest(x.float(), weight, torch.float32))

    return call


def _cut_off(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -0x10000).view(torch.float32).to(torch.bfloat16)


def few_bits(honest: Op) -> Op:
    def call(x: Tensor, weight: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
        column = torch.arange(x.shape[1], device=x.device) // _CHUNK
        total = None
        for chunk in range(-(-x.shape[1] // _CHUNK)):
            part = honest(torch.where(column == chunk, x, 0), weight, torch.float32).bfloat16()
            total = part if total is None else total + part
        assert total is not None
        return total.to(out_dtype or x.dtype)

    return call


def without_last(out: Tensor) -> Tensor:
    out = out.clone()
    out[:, -1:] = 0
    return out


def unwritten(out: Tensor) -> Tensor:
    found = torch.empty_like(out)
    found[:-1] = out[:-1]
    return found


def next_row(ids: Tensor, weight: Tensor) -> tuple[Any, ...]:
    return (ids + 1) % weight.shape[0], weight


def unordered(honest: Op) -> Op:
    calls = [0]

    def call(*args: Any) -> Tensor:
        calls[0] += 1
        found: Tensor = honest(*args)
        return _last_bit(found) if calls[0] % 2 else found

    return call


def by_batch(honest: Op) -> Op:
    def call(x: Tensor, *more: Any) -> Tensor:
        found: Tensor = honest(x, *more)
        return _last_bit(found) if x.shape[0] == 1 else found

    return call


def _last_bit(x: Tensor) -> Tensor:
    """The first value's last bit is another."""
    bits = x.clone().view(torch.int16 if x.element_size() == 2 else torch.int32)
    if bits.numel():
        bits.view(-1)[0] ^= 1
    return bits.view(x.dtype)


def in_place(honest: Op) -> Op:
    def call(x: Tensor, *more: Any) -> Tensor:
        found: Tensor = honest(x, *more)
        x.copy_(found)
        return found

    return call


def kept_input(honest: Op) -> Op:
    kept: list[Tensor] = []

    def call(x: Tensor, *more: Any) -> Tensor:
        for one in kept:
            one.add_(1)
        kept[:] = [x]
        found: Tensor = honest(x, *more)
        return found

    return call


def one_buffer(honest: Op) -> Op:
    buffers: dict[tuple[int, ...], Tensor] = {}

    def call(gate_up: Tensor) -> Tensor:
        found: Tensor = honest(gate_up)
        return buffers.setdefault(tuple(found.shape), torch.empty_like(found)).copy_(found)

    return call


def view_returned(honest: Op) -> Op:
    def call(x: Tensor, *more: Any) -> Tensor:
        x.copy_(honest(x, *more))
        return x.view(x.shape)

    return call


def narrow_weights(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return weights.bfloat16(), ids


def transposed(out: Tensor) -> Tensor:
    return out.t().contiguous().t()


def renormalised(
    x: Tensor, weight: Tensor, topk: int, renormalize: bool, scale: float
) -> tuple[Any, ...]:
    return x, weight, topk, not renormalize, scale


def next_exponent(honest: Op) -> Op:
    def call(x: Tensor, format: str, rule: str | None = None) -> Weight:
        found: Weight = honest(x, format, rule)
        if format != "mxfp4":
            return found
        scale = torch.where(found.parts["scale"] < 254, found.parts["scale"] + 1, 254)
        factor = torch.exp2(scale.double() - 127).repeat_interleave(32, -1)
        values = mxfp4.dequantize(found.parts["data"], found.parts["scale"]).double()
        code = e2m1.pack(e2m1.encode((values / factor).float()))
        return replace(found, parts={"data": code, "scale": scale.to(torch.uint8)})

    return call


def cut_off(honest: Op) -> Op:
    def call(x: Tensor, format: str, rule: str | None = None) -> Weight:
        found: Weight = honest(x, format, rule)
        if format != "bf16":
            return found
        return replace(found, parts={"data": _cut_off(x.float())})

    return call


def swapped_nibbles(weight: Weight) -> Weight:
    if weight.format not in ("mxfp4", "nvfp4"):
        return weight
    data = weight.parts["data"]
    return replace(weight, parts={**weight.parts, "data": (data << 4) | (data >> 4)})


def noise_by_row(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Any, ...]:
    row = torch.arange(len(seeds), device=seeds.device)
    return logits, temperature, seeds + row, positions


def colder(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Any, ...]:
    return logits, temperature * 0.9, seeds, positions
