"""Whether a layer's weights can be cut over tensor ranks. A cut through a matrix falls between the
blocks that a scale serves: values and scales are cut evenly, each on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from torch import Tensor

from ml4core.api import LayerSpec, Refusal, Weight
from ml4core.formats import fp8_block
from ml4core_tpu.kernels.layer.mesh import EXPERTS, GATED, cut_of
from ml4core_tpu.product_ops import GROUPS

_SIDE = ("rows", "columns")
_BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"fp8_block": (fp8_block.BLOCK,) * 2} | {name: (1, group) for name, group in GROUPS.items()}
)
"""Rows and columns that a scale serves, by format; (1, 1) for others."""


def cut_refusals(
    layer: LayerSpec, weights: Mapping[str, Tensor | Weight], tensor: int, by_width: bool
) -> Iterator[Refusal]:
    """A reason for each matrix of which ``tensor`` ranks wouldn't have whole blocks. ``weights`` in
    open formats, whole on a data rank; ``by_width`` as for ``weight_specs``.
    """
    for name, value in weights.items():
        if not isinstance(value, Weight):
            continue
        axis, over = cut_of(name, packed=False, by_width=by_width)
        side = axis - len(value.shape) + 2  # -1: heads, or whole experts
        if not over or side < 0:
            continue
        gated = name in GATED
        size = value.shape[axis] // (2 if gated else 1)
        block = _BLOCKS.get(value.format, (1, 1))[side]
        if _divides(size, tensor, block):
            continue
        what = f"{_SIDE[side]} of gate and of up" if gated else _SIDE[side]
        unit = f"a multiple of {block}, the block of {value.format}" if block > 1 else "whole"
        reason = (
            f"layer {layer.index}: {name}: {size} {what} over {tensor} tensor ranks are "
            f"{size / tensor:g} each, not {unit}"
        )
        fits = [n for n in range(1, tensor) if _divides(size, n, block) and not layer.heads % n]
        remedy = f"--tensor-parallel-size {' or '.join(map(str, fits))}"
        if name in EXPERTS:
            remedy += "; or --enable-expert-parallel, by which experts stay whole"
        yield Refusal("tpu", f"--tensor-parallel-size {tensor}", reason, remedy)


def _divides(size: int, ranks: int, block: int) -> bool:
    return ranks == 1 or size % (ranks * block) == 0
