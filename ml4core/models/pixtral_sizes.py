"""How large images are for the vision encoder. Imports no torch: requests are checked with it."""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.api import VisionSpec


def image_cells(spec: VisionSpec, height: int, width: int) -> tuple[int, int]:
    """Cells (rows, columns) of an image of so many pixels once it is preprocessed.

    An image longer than `image_size` is shrunk to it; then sides are rounded up to whole cells.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image of {height} x {width} pixels; both must be 1 or more")
    ratio = max(height / spec.image_size, width / spec.image_size)
    if ratio > 1:
        height, width = max(round(height / ratio), 1), max(round(width / ratio), 1)
    return (height - 1) // spec.cell_size + 1, (width - 1) // spec.cell_size + 1


def unfit(spec: VisionSpec, shape: Sequence[int]) -> str:
    """What is wrong with the size of a preprocessed image [C, H, W], and what works; empty if
    nothing is.
    """
    size = spec.cell_size
    longest = -(-spec.image_size // size) * size
    if len(shape) != 3 or shape[0] != spec.channels:
        return f"shape {tuple(shape)}; must be [{spec.channels}, H, W]"
    if any(side < size or side % size or side > longest for side in shape[1:]):
        return (
            f"{shape[1]} x {shape[2]} pixels; both must be multiples of {size}, from {size} to "
            f"{longest}"
        )
    return ""
