"""Images of prompts, and the places of their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ml4core.engine.errors import RequestError

_KEY_BYTES = 16
_NO_TEXT = b"\xff"
"""Begins what names an image, so that no salt, which is a text in UTF-8, can be the same."""


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image and its place in a prompt.

    Attributes:
        pixels: fp32 [C, H, W], normalised, whole cells high and wide.
        rows: int64 [cells], ascending: the prompt's positions that take its embeddings.
        key: the same for equal pixels alone.
    """

    pixels: NDArray[np.float32]
    rows: NDArray[np.int64]
    key: bytes

    @property
    def start(self) -> int:
        return int(self.rows[0])

    @property
    def end(self) -> int:
        return int(self.rows[-1]) + 1


def place_images(
    token_ids: Sequence[int], images: Sequence[NDArray[Any]], image_id: int, cell_size: int
) -> tuple[PlacedImage, ...]:
    """Images in the order of their places, which are the tokens ``image_id``, one for each cell.

    Raises ``RequestError`` if a prompt has another count of those.
    """
    places = np.flatnonzero(np.asarray(token_ids) == image_id)
    counts = [(image.shape[1] // cell_size) * (image.shape[2] // cell_size) for image in images]
    if sum(counts) != len(places):
        works = f"{sum(counts)}, for {len(images)} images"
        raise RequestError("image tokens of the prompt", len(places), works)
    placed, at = [], 0
    for image, count in zip(images, counts, strict=True):
        pixels = np.ascontiguousarray(image, np.float32)
        digest = blake2b(repr(pixels.shape).encode(), digest_size=_KEY_BYTES)
        digest.update(pixels.data)
        placed.append(PlacedImage(pixels, places[at : at + count], digest.digest()))
        at += count
    return tuple(placed)


class ImageRows(NamedTuple):
    """Rows ``first`` and following of a plan that take embeddings of an image.

    Attributes:
        rows: of the plan, ascending.
        first: the image's embedding that the first of them takes; the others take the next ones.
    """

    image: PlacedImage
    rows: NDArray[np.int64]
    first: int


def rows_of(images: Sequence[PlacedImage], start: int, end: int, row: int) -> list[ImageRows]:
    """Of the prompt's positions ``start`` to ``end``, which stand in a plan from ``row`` on."""
    found = []
    for image in images:
        low, high = np.searchsorted(image.rows, (start, end)).tolist()
        if low < high:
            found.append(ImageRows(image, image.rows[low:high] - start + row, low))
    return found


def block_keys(images: Sequence[PlacedImage], start: int, end: int) -> tuple[bytes, ...]:
    """What images make of a block of the tokens ``start`` to ``end``: which, and where in it."""
    return tuple(
        _NO_TEXT + image.key + (image.start - start).to_bytes(8, "little", signed=True)
        for image in images
        if image.start < end and start < image.end
    )


def padded_rows(count: int) -> int:
    """Rows of embeddings that a step with so many has."""
    return 1 << (count - 1).bit_length() if count else 0
