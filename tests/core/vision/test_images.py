"""Images to patches, positions and counts, as mistral-common's tokens want them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ml4core.models.pixtral_images import patch_images
from ml4core.models.pixtral_sizes import image_cells

from .support import random_images, spec_of

LARGE = replace(spec_of(), patch_size=14, image_size=1540)
"""28 pixels a cell."""


@pytest.mark.parametrize(
    ("height", "width", "cells"),
    [
        (701, 1023, (26, 37)),
        (1540, 1540, (55, 55)),
        (1, 1, (1, 1)),
        (28, 29, (1, 2)),
        (1541, 1540, (55, 55)),
        (3080, 1000, (55, 18)),
        (100_000, 7, (55, 1)),  # the short side would be rounded to no pixel
    ],
)
def test_cells_of_an_image(height: int, width: int, cells: tuple[int, int]) -> None:
    assert image_cells(LARGE, height, width) == cells


@pytest.mark.parametrize(("cells", "count"), [((26, 37), 962), ((55, 55), 3025)])
def test_counts_of_large_images(cells: tuple[int, int], count: int) -> None:
    batch = patch_images(LARGE, [np.zeros((3, 28 * cells[0], 28 * cells[1]), dtype=np.float32)])
    assert (batch.grids, batch.counts) == ((cells,), (count,))
    assert batch.patches.shape == (4 * count, 588)
    assert batch.positions[-1].tolist() == [2 * cells[0] - 1, 2 * cells[1] - 1]


def test_counts_are_those_of_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from mistral_common.protocol.instruct.chunk import ImageChunk
    from mistral_common.tokens.tokenizers import image as tokenizer
    from PIL import Image

    # Only the resizing is left out: it needs another library, and changes no size.
    monkeypatch.setattr(
        tokenizer,
        "transform_image",
        lambda image, size: np.zeros((3, size[1], size[0]), dtype=np.float32),
    )
    spec = replace(LARGE, image_size=280)
    encode = tokenizer.ImageEncoder(
        tokenizer.ImageConfig(spec.patch_size, spec.image_size, spec.spatial_merge_size),
        tokenizer.SpecialImageIDs(10, 12, 13),
    )
    for width, height in ((1, 1), (280, 280), (281, 279), (29, 300), (997, 13), (85, 84), (5, 900)):
        encoding = encode(ImageChunk(image=Image.new("RGB", (width, height))))
        batch = patch_images(spec, [encoding.image])
        assert batch.counts == (encoding.tokens.count(10),)
        rows, _ = batch.grids[0]
        assert encoding.tokens.count(12) + encoding.tokens.count(13) == rows
        assert batch.grids[0] == image_cells(spec, height, width)


def test_order_of_patches_and_values() -> None:
    # 2 x 3 cells of 2 x 2 patches of 2 x 2 pixels; each value tells its place.
    spec = replace(spec_of(), patch_size=2)
    place = np.indices((3, 8, 12)).astype(np.float64)
    image = place[0] * 10_000 + place[1] * 100 + place[2]
    batch = patch_images(spec, [image])
    assert batch.patches.dtype == torch.float32
    grid = [(cy, cx, dy, dx) for cy in (0, 1) for cx in (0, 1, 2) for dy in (0, 1) for dx in (0, 1)]
    assert batch.positions.tolist() == [[2 * cy + dy, 2 * cx + dx] for cy, cx, dy, dx in grid]
    for patch, (row, column) in zip(batch.patches.tolist(), batch.positions.tolist(), strict=True):
        pixels = [(2 * row + y, 2 * column + x) for y in (0, 1) for x in (0, 1)]
        assert patch == [c * 10_000 + y * 100 + x for c in (0, 1, 2) for y, x in pixels]


def test_a_batch_of_images() -> None:
    spec = spec_of()
    batch = patch_images(spec, random_images(spec, ((1, 2), (2, 1))), pad_to=20)
    assert batch.grids == ((1, 2), (2, 1))
    assert batch.counts == (2, 2)
    assert batch.image_ids.tolist() == [0] * 8 + [1] * 8 + [-1] * 4
    assert batch.image_ids.dtype == torch.int32
    assert batch.positions.dtype == torch.int64
    assert not batch.patches[16:].any()
    assert not batch.positions[16:].any()


def test_images_are_not_changed_and_not_kept() -> None:
    spec = spec_of()
    (image,) = random_images(spec, [(2, 2)])
    # As mistral-common gives them: channels last in memory. And not to be written.
    turned = np.moveaxis(np.ascontiguousarray(np.moveaxis(image, 0, -1)), -1, 0)
    turned.flags.writeable = False
    batch = patch_images(spec, [turned])
    assert torch.equal(batch.patches, patch_images(spec, [image]).patches)
    batch.patches.zero_()
    assert image.any()


def bad(**changes: Any) -> np.ndarray:
    image = np.zeros((3, 16, 8), dtype=np.float32)
    for key, value in changes.items():
        image = image.reshape(value) if key == "shape" else image.astype(value)
    return image


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (bad(shape=(16, 8, 3)), r"shape \(16, 8, 3\); must be \[3, H, W\]"),
        (bad(shape=(24, 16)), r"shape \(24, 16\); must be \[3, H, W\]"),
        (bad(shape=(3, 32, 4)), "32 x 4 pixels; both must be multiples of 8, from 8 to 48"),
        (np.zeros((3, 16, 0), dtype=np.float32), "16 x 0 pixels"),
        (np.zeros((3, 8, 56), dtype=np.float32), "8 x 56 pixels.*from 8 to 48"),
        (bad(dtype=np.uint8), "dtype uint8; must be normalised floats"),
        (np.full((3, 8, 8), np.nan, dtype=np.float32), "holds NaN or infinity"),
        (np.full((3, 8, 8), 1e300), "holds NaN or infinity"),
    ],
)
def test_bad_images_are_named(image: np.ndarray, text: str) -> None:
    with pytest.raises(ValueError, match=f"image 1: .*{text}"):
        patch_images(spec_of(), [bad(), image])


def test_sides_are_rounded_up_beyond_the_limit() -> None:
    # 45 pixels become 6 cells of 8: what preprocessing gives must be taken.
    spec = spec_of(image_size=45, max_image_size=45)
    assert image_cells(spec, 45, 9) == (6, 2)
    assert patch_images(spec, random_images(spec, [(6, 2)])).counts == (12,)


@pytest.mark.parametrize("pad_to", [4, 9, 0])
def test_bad_padding_is_named(pad_to: int) -> None:
    spec = spec_of()
    with pytest.raises(ValueError, match=f"pad_to is {pad_to}; the images have 8 patches.*of 4"):
        patch_images(spec, random_images(spec, [(1, 2)]), pad_to=pad_to)


def test_nothing_to_encode_is_refused() -> None:
    with pytest.raises(ValueError, match="no images"):
        patch_images(spec_of(), [])
    with pytest.raises(ValueError, match="0 x 5 pixels"):
        image_cells(spec_of(), 0, 5)
