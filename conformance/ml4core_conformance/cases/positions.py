"""Inputs of ``rope`` and ``ssmax``."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ml4core.api import SSMaxSpec
from ml4core_conformance.case import Arguments, OpCase
from ml4core_conformance.draw import Draw
from ml4core_conformance.op_inputs import ACTIVATIONS, needs, strided

_FAR = 1 << 20
_POSITIONS = (0, 1, 2, 3, 63, 8191, 8192, 16384, 65535, 65536, 262143, 777777, _FAR - 1, _FAR)


def cases() -> list[OpCase]:
    return [case for act, dtype in ACTIVATIONS.items() for case in _of(act, dtype)]


def _of(act: str, dtype: torch.dtype) -> list[OpCase]:
    words = needs(act)
    corners = {"position 0", "position 2^20", "both pairings"}
    found = [
        OpCase(
            "rope",
            act,
            "pairs" if interleaved else "halves",
            partial(_rope, interleaved, dtype),
            frozenset(corners),
            words,
            small=True,
            bugs=("B005",),
        )
        for interleaved in (True, False)
    ]
    identity = frozenset({"width 0 is the identity"})
    found += [
        OpCase("rope", act, "empty", partial(_rope_empty, dtype), identity, words),
        OpCase("rope", act, "unit", partial(_rope_unit, dtype), requires=words, bugs=("B005",)),
        OpCase("rope", act, "none", partial(_no_rows, dtype), requires=words),
        OpCase("rope", act, "slice", partial(_rope_slice, dtype), requires=words),
        OpCase(
            "rope",
            act,
            "start",
            partial(_rope_start, dtype),
            frozenset({"position 0"}),
            words,
            small=True,
            options={"exact": True},
        ),
    ]
    sides = frozenset({"position 0", "either side of original_max_position"})
    for spec in (
        SSMaxSpec("llama4"),
        SSMaxSpec("pow", original_max_position=2048),
        SSMaxSpec("floor", beta=0.3, original_max_position=4096),
        SSMaxSpec("log", scale=0.43),
        SSMaxSpec("none"),
        SSMaxSpec("log", scale=0.43, n_limit=2048),
    ):
        name = spec.kind if spec.n_limit is None else f"{spec.kind}-capped"
        make = partial(_ssmax, spec, dtype)
        small = spec.kind == "llama4"
        found.append(OpCase("ssmax", act, name, make, sides, words, small, bugs=("B044",)))
    for spec in (
        SSMaxSpec("log", per_head=True, bias=True),
        SSMaxSpec("llama4", per_head=True),
    ):
        make = partial(_ssmax_heads, spec, dtype)
        found.append(
            OpCase("ssmax", act, f"{spec.kind}-heads", make, frozenset({"per head"}), words)
        )
    return found


def frequencies(draw: Draw, pairs: int) -> Tensor:
    """fp32 [pairs]: geometric, each with a learned factor near 1."""
    exponents = torch.arange(pairs, dtype=torch.float64) / max(1, pairs)
    return (10000.0**-exponents).to(torch.float32) * draw.uniform(pairs, low=0.9, high=1.1)


def _rope(interleaved: bool, dtype: torch.dtype, draw: Draw) -> Arguments:
    positions = torch.tensor(_POSITIONS)
    return {
        "x": draw.normal(len(positions), 3, 64, dtype=dtype),
        "positions": positions,
        "inv_freq": frequencies(draw, 32),
        "interleaved": interleaved,
        "magnitude": 1.0 if interleaved else 1.3584,
    }


def _rope_unit(dtype: torch.dtype, draw: Draw) -> Arguments:
    """A single 1 at the front, at position 1: goes to lanes 0 and 32."""
    x = torch.zeros(4, 1, 64, dtype=dtype)
    x[:, :, 0] = 1
    positions = torch.tensor([1, 2, 5, 9])
    inv_freq = frequencies(draw, 32)
    return {
        "x": x,
        "positions": positions,
        "inv_freq": inv_freq,
        "interleaved": False,
        "magnitude": 1.0,
    }


def _rope_slice(dtype: torch.dtype, draw: Draw) -> Arguments:
    """Rotated dims that are a slice of a head, at positions that repeat and fall."""
    positions = torch.tensor([100, 99, 99, 3, 70000, 5])
    return {
        "x": strided(draw.normal(6, 8, 64, dtype=dtype), before=128, behind=0),
        "positions": positions,
        "inv_freq": frequencies(draw, 32),
        "interleaved": True,
        "magnitude": 1.0,
    }


def _rope_start(dtype: torch.dtype, draw: Draw) -> Arguments:
    """At position 0 nothing turns: the result is x itself."""
    args = _rope(True, dtype, draw)
    return {**args, "positions": torch.zeros(len(_POSITIONS), dtype=torch.int64)}


def _rope_empty(dtype: torch.dtype, draw: Draw) -> Arguments:
    return {
        "x": torch.zeros(4, 2, 0, dtype=dtype),
        "positions": torch.tensor([0, 1, 500, _FAR]),
        "inv_freq": torch.zeros(0),
        "interleaved": True,
        "magnitude": 1.0,
    }


def _no_rows(dtype: torch.dtype, draw: Draw) -> Arguments:
    args = _rope(True, dtype, draw)
    return {**args, "x": args["x"][:0], "positions": args["positions"][:0]}


def _ssmax(spec: SSMaxSpec, dtype: torch.dtype, draw: Draw) -> Arguments:
    near = (0, 1, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 8193, 16383, 16384, 65536, _FAR)
    positions = torch.tensor(near)
    return {
        "x": draw.normal(len(near), 4, 96, dtype=dtype),
        "positions": positions,
        "spec": spec,
    }


def _ssmax_heads(spec: SSMaxSpec, dtype: torch.dtype, draw: Draw) -> Arguments:
    args = _ssmax(spec, dtype, draw)
    args = {**args, "x": strided(args["x"]), "scale": 0.5 + 0.2 * draw.normal(4)}
    return {**args, "bias": 0.1 * draw.normal(4)} if spec.bias else args
