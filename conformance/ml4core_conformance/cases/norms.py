"""Inputs of the norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ml4core_conformance.case import Arguments, OpCase
from ml4core_conformance.draw import Draw
from ml4core_conformance.op_inputs import ACTIVATIONS, needs, small_integers, strided

_EPS = 1e-6


@dataclass(frozen=True)
class Ranks:
    """The ``Collectives`` of rank 0, whose other ranks hold ``others``, tensors on the CPU."""

    others: Sequence[Tensor] = ()
    rank: int = 0

    @property
    def world_size(self) -> int:
        return 1 + len(self.others)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.to(torch.float32)
        for other in self.others:
            total = total + other.to(device=x.device, dtype=torch.float32)
        return total.to(x.dtype) if self.others else x.clone()

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return torch.cat([x, *(other.to(x) for other in self.others)], dim)

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        return self.all_reduce(x).chunk(self.world_size, dim)[self.rank]

    def all_to_all(self, x: Tensor, dim: int = 0) -> Tensor:
        chunks = [part.chunk(self.world_size, dim)[self.rank] for part in (x, *self.others)]
        return torch.cat([chunk.to(x) for chunk in chunks], dim)


def cases() -> list[OpCase]:
    return [case for act, dtype in ACTIVATIONS.items() for case in _of(act, dtype)]


def _of(act: str, dtype: torch.dtype) -> list[OpCase]:
    def case(
        op: str, name: str, make: Callable[[Draw], Arguments], *corners: str, small: bool = False
    ) -> OpCase:
        return OpCase(op, act, name, make, frozenset(corners), needs(act), small)

    return [
        case("rms_norm", "rows", partial(_rms, 33, 640, dtype), small=True),
        case("rms_norm", "one", partial(_rms, 1, 6144, dtype), "one row"),
        case("rms_norm", "none", partial(_rms, 0, 640, dtype)),
        case("rms_norm", "heads", partial(_rms_heads, dtype)),
        case("rms_norm", "edges", partial(_rms_edges, dtype), "all zero row", "huge row"),
        case("layer_norm", "rows", partial(_layer, 65, 128, dtype), small=True),
        case("layer_norm", "one", partial(_layer, 1, 128, dtype), "one row"),
        case("layer_norm", "none", partial(_layer, 0, 128, dtype)),
        case("layer_norm", "edges", partial(_layer_edges, dtype), "constant row"),
        case("all_reduce_rms_norm", "one", partial(_add, 19, 768, dtype), "world 1", small=True),
        case("all_reduce_rms_norm", "none", partial(_add, 0, 320, dtype)),
        case("all_reduce_rms_norm", "bare", partial(_add_bare, dtype), "no weight"),
        *_several_ranks(act, dtype),
        OpCase(
            "all_reduce_rms_norm",
            act,
            "rounded",
            partial(_add_integers, dtype),
            requires=needs(act),
            small=True,
            options={"exact": ("residual",)},
        ),
    ]


def _weight(draw: Draw, width: int, dtype: torch.dtype) -> Tensor:
    return (1 + 0.2 * draw.normal(width)).to(dtype)


def _rms(rows: int, width: int, dtype: torch.dtype, draw: Draw) -> Arguments:
    x = draw.normal(rows, width, dtype=dtype) * 3
    return {"x": x, "weight": _weight(draw, width, dtype), "eps": _EPS}


def _rms_heads(dtype: torch.dtype, draw: Draw) -> Arguments:
    """Three axes, and rows that are slices of wider ones, as the latent of a joint product is."""
    x = strided(draw.normal(7, 5, 192, dtype=dtype))
    return {"x": x, "weight": _weight(draw, 192, torch.float32).to(dtype), "eps": 1e-5}


def _rms_edges(dtype: torch.dtype, draw: Draw) -> Arguments:
    x = draw.normal(8, 256, dtype=dtype)
    x[0] = 0
    x[1] *= 1e30  # its square is beyond fp32
    x[2] *= 1e-20  # its mean square is far below eps
    x[3] = torch.where(torch.arange(256) == 17, 1e4, 0.0).to(dtype)
    x[4, 5] = torch.nan  # a row with NaN spoils itself alone
    return {"x": x, "weight": _weight(draw, 256, dtype), "eps": _EPS}


def _layer(rows: int, width: int, dtype: torch.dtype, draw: Draw) -> Arguments:
    x = draw.normal(rows, width, dtype=dtype) + 0.5
    weight, bias = _weight(draw, width, torch.float32), 0.3 * draw.normal(width)
    return {"x": x, "weight": weight, "bias": bias, "eps": _EPS}


def _layer_edges(dtype: torch.dtype, draw: Draw) -> Arguments:
    args = _layer(6, 128, dtype, draw)
    x = args["x"].clone()
    x[0] = 3.3
    x[1] = 0
    x[2] = 1000 + draw.normal(128)  # a mean that is large against the spread
    x[3] *= 1e-6
    return {**args, "x": strided(x)}


def _add(rows: int, width: int, dtype: torch.dtype, draw: Draw) -> Arguments:
    return {
        "x": draw.normal(rows, width, dtype=dtype),
        "residual": draw.normal(rows, width, dtype=dtype) * 4,
        "weight": _weight(draw, width, dtype),
        "eps": _EPS,
        "collectives": Ranks(),
    }


def _add_bare(dtype: torch.dtype, draw: Draw) -> Arguments:
    return {**_add(5, 320, dtype, draw), "weight": None}


def _add_integers(dtype: torch.dtype, draw: Draw) -> Arguments:
    """Sums of 9 to 12 bits: half of those that bf16 can't hold are ties."""
    residual = (64 * small_integers(draw, 16, 256, dtype=torch.float32)).to(dtype)
    x = draw.integers(16, 256, low=-255, high=256).to(dtype)
    return {**_add(16, 256, dtype, draw), "x": x, "residual": residual}


def _several_ranks(act: str, dtype: torch.dtype) -> list[OpCase]:
    # Drawn apart, as the oracle is told of them too.
    others = tuple(Draw(0, f"ranks/{act}/{rank}").normal(9, 512, dtype=dtype) for rank in (1, 2, 3))

    def make(draw: Draw) -> Arguments:
        return {**_add(9, 512, dtype, draw), "collectives": Ranks(others)}

    options = {"ranks": others}
    op = "all_reduce_rms_norm"
    return [OpCase(op, act, "four", make, requires=needs(act), options=options)]
