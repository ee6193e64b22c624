"""Preprocessed images as the patches that the vision encoder takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ml4core.api import VisionSpec
from ml4core.models.pixtral_sizes import unfit


@dataclass(frozen=True)
class ImageBatch:
    """The input of the stage `vision_encoder`; T patches, padding included.

    Attributes:
        patches: [T, C p p] fp32, cell after cell; in a cell row by row; values by channel first.
        positions: [T, 2] int64, (row, column) in the image's grid of patches; 0 in padding.
        image_ids: [T] int32, the number of the image; -1 in padding.
        grids: cells of each image, (rows, columns).
    """

    patches: Tensor
    positions: Tensor
    image_ids: Tensor
    grids: tuple[tuple[int, int], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many embeddings each image gives; they follow each other in the stage's result."""
        return tuple(rows * columns for rows, columns in self.grids)


def patch_images(
    spec: VisionSpec, images: Sequence[npt.NDArray[Any]], pad_to: int | None = None
) -> ImageBatch:
    """Cuts images into patches, and appends padding up to `pad_to` patches, if given.

    `images` are arrays [C, H, W] of floats, normalised, each a whole number of cells high and wide.

    Raises ValueError that names the image, and what was found and wanted.
    """
    if not images:
        raise ValueError("no images: there must be one at least")
    checked = [_checked(spec, index, image) for index, image in enumerate(images)]
    size, cell = spec.cell_size, spec.cell_patches
    grids = tuple((image.shape[1] // size, image.shape[2] // size) for image in checked)
    total = sum(rows * columns for rows, columns in grids) * cell
    if pad_to is not None and (pad_to < total or pad_to % cell):
        raise ValueError(
            f"pad_to is {pad_to}; the images have {total} patches, and it must be a multiple of "
            f"{cell} that is not less"
        )
    length = total if pad_to is None else pad_to
    patches = torch.zeros((length, spec.patch_dim), dtype=torch.float32)
    positions = torch.zeros((length, 2), dtype=torch.int64)
    image_ids = torch.full((length,), -1, dtype=torch.int32)
    start = 0
    for index, (image, grid) in enumerate(zip(checked, grids, strict=True)):
        stop = start + grid[0] * grid[1] * cell
        patches[start:stop] = _patches(spec, torch.from_numpy(image), grid)
        positions[start:stop] = _positions(spec, grid)
        image_ids[start:stop] = index
        start = stop
    return ImageBatch(patches, positions, image_ids, grids)


def _checked(spec: VisionSpec, index: int, image: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A copy of the image in fp32."""
    if problem := unfit(spec, image.shape):
        raise ValueError(f"image {index}: {problem}")
    if image.dtype.kind != "f":
        raise ValueError(f"image {index}: dtype {image.dtype}; must be normalised floats")
    with np.errstate(over="ignore"):  # found as an infinity below
        values: npt.NDArray[np.float32] = np.array(image, dtype=np.float32, order="C")
    if not np.isfinite(values).all():
        raise ValueError(f"image {index}: holds NaN or infinity; all values must be finite")
    return values


def _patches(spec: VisionSpec, image: Tensor, grid: tuple[int, int]) -> Tensor:
    """[C, H, W] to [patches, C p p]."""
    s, p = spec.spatial_merge_size, spec.patch_size
    cells = image.view(spec.channels, grid[0], s, p, grid[1], s, p)
    # To cell row, cell column, row in the cell, column in the cell, channel, row, column.
    return cells.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, spec.patch_dim)


def _positions(spec: VisionSpec, grid: tuple[int, int]) -> Tensor:
    """(row, column) of each patch, [patches, 2], in the order of `_patches`."""
    s = spec.spatial_merge_size
    rows = torch.arange(grid[0] * s).view(grid[0], 1, s, 1).expand(-1, grid[1], -1, s)
    columns = torch.arange(grid[1] * s).view(1, grid[1], 1, s).expand(grid[0], -1, s, -1)
    return torch.stack((rows.reshape(-1), columns.reshape(-1)), dim=-1)
