"""The kernels within a program, and what each takes of a core's own memories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

_WINDOWS = 2
"""A block's copy is under way while the one before is worked on."""


@dataclass(frozen=True)
class Kernel:
    """Attributes:
    programs: of its grid, at most: what depends on data may end sooner.
    vmem, smem: bytes of its blocks, twice, and of its own buffers. The compiler's spills are not
        in them.
    copies: places in its text that start one.
    """

    name: str
    programs: int
    vmem: int
    smem: int
    copies: int


def kernels_of(traced: Any) -> list[Kernel]:
    """Those of a traced program, in order."""
    return [_kernel(call) for call in _calls(traced.jaxpr.jaxpr)]


def _calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for inner in _inner(equation):
            yield from _calls(inner)


def _inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, list | tuple) else [value]:
            jaxpr = getattr(one, "jaxpr", one)
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def _kernel(call: Any) -> Kernel:
    mapping, body = call.params["grid_mapping"], call.params["jaxpr"]
    sizes = {"vmem": 0, "smem": 0}
    blocks = range(
        mapping.num_index_operands,
        mapping.num_index_operands + mapping.num_inputs + mapping.num_outputs,
    )
    for place, variable in enumerate(body.invars):
        space = str(getattr(variable.aval, "memory_space", None))
        kind = {"smem": "smem", "vmem": "vmem", "default": "vmem"}.get(space)
        if kind is None:  # of the device's memory, or a semaphore
            continue
        shape = variable.aval.shape
        size = prod(shape) * variable.aval.dtype.itemsize
        moves = place in blocks and prod(mapping.grid) > 1
        sizes[kind] += size * (_WINDOWS if moves else 1)
    return Kernel(
        str(call.params["name"]),
        prod(mapping.grid),
        sizes["vmem"],
        sizes["smem"],
        _starts(body),
    )


def _starts(jaxpr: Any) -> int:
    own = sum(equation.primitive.name == "dma_start" for equation in jaxpr.eqns)
    return own + sum(_starts(inner) for one in jaxpr.eqns for inner in _inner(one))
