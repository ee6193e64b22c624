"""All experts of a layer in one tensor, as views of single experts' matrices.

    experts.gate_up_proj [E, 2 I, H], each expert's gate above its up   experts.down_proj [E, H, I]

Scales beside them are one for each 128 x 128 block of an expert, or one for each expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ml4core.formats import fp8_block
from ml4core.models.safetensors_file import TensorInfo
from ml4core.models.tensor_names import TensorName

_PARTS = {"w13": ("w1", "w3"), "w2": ("w2",)}


def is_fused(key: TensorName) -> bool:
    """Whether the tensor of this canonical name holds all experts of a layer."""
    return key.stem.endswith((".experts.w13", ".experts.w2"))


def split_shape(
    key: TensorName, shape: tuple[int, ...]
) -> Iterator[tuple[TensorName, tuple[int, ...], tuple[int, int]]]:
    """The single matrices in a fused tensor: name, shape, and elements [begin, end) of it.

    Raises ValueError, in words that follow a tensor's name.
    """
    prefix, _, part = key.stem.rpartition(".")
    names = _PARTS[part]
    if not shape or len(shape) not in (1, 2, 3):
        raise ValueError(f"{list(shape)}, wanted experts first")
    count, inner = shape[0], shape[1:]
    size = math.prod(inner)
    whole = key.suffix != "weight" and size == 1  # one number serves all of an expert
    if key.suffix == "weight" and len(shape) != 3:
        raise ValueError(f"{list(shape)}, wanted experts x rows x columns")
    if not whole and (len(inner) != 2 or inner[0] % len(names)):
        unit = f"; an expert's half may end within a block of {fp8_block.BLOCK}"
        hint = unit if key.suffix != "weight" else ""
        raise ValueError(f"{list(shape)}, wanted {len(names)} matrices of equal height{hint}")
    for expert in range(count):
        for place, name in enumerate(names):
            stem = f"{prefix}.{expert}.{name}"
            if whole:
                yield TensorName(stem, key.suffix), (), (expert, expert + 1)
                continue
            rows = inner[0] // len(names)
            begin = expert * size + place * rows * inner[1]
            yield TensorName(stem, key.suffix), (rows, inner[1]), (begin, begin + rows * inner[1])


def split(key: TensorName, info: TensorInfo) -> Iterator[tuple[TensorName, TensorInfo]]:
    """The single matrices in a fused tensor, by canonical name, as views. Raises ValueError."""
    size = info.torch_dtype.itemsize
    for name, shape, (begin, end) in split_shape(key, info.shape):
        view = replace(
            info,
            name=f"{info.name} ({name})",
            shape=shape,
            start=info.start + begin * size,
            nbytes=(end - begin) * size,
        )
        yield name, view
