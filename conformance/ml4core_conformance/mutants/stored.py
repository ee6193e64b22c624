"""Mutants of what is stored where caches are coarser than activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core_conformance.mutant import Mutant
from ml4core_conformance.mutants.altered import AlteredSession, Changed


def mutants() -> list[Mutant]:
    rows: Sequence[tuple[str, str, Callable[[AlteredSession], None], tuple[str, ...]]] = (
        (
            "row-bit-lost",
            "A cache of bf16 under fp32 activations holds rows of one bit less.",
            one_bit_less,
            ("model.logits[mixed]", "stages.draft_block[row/mixed]"),
        ),
        (
            "row-bits-lost",
            "A cache of bf16 under fp32 activations holds rows of four bits less.",
            four_bits_less,
            ("model.engine[rounded]",),
        ),
    )
    return [Mutant(name, doc, Changed(change), dies) for name, doc, change, dies in rows]


def one_bit_less(session: AlteredSession) -> None:
    _rounded(session, 7)


def four_bits_less(session: AlteredSession) -> None:
    _rounded(session, 4)


def _rounded(session: AlteredSession, bits: int) -> None:
    write = session.honest["kv_write"]

    def few(x: Tensor) -> Tensor:
        fraction, exponent = torch.frexp(x.float())
        return torch.ldexp((fraction * 2**bits).round() / 2**bits, exponent).to(x.dtype)

    def call(cache: KVCache, slots: Tensor, latent: Tensor, rope: Tensor | None = None) -> None:
        write(cache, slots, few(latent), None if rope is None else few(rope))

    session.ops["kv_write"] = call
