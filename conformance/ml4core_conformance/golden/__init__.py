"""Golden pages: small committed files that say, byte by byte, how each layout lies in memory.

They were written by the oracle's byte loop. ``python -m ml4core_conformance.golden`` writes them
again; a test holds them against what the oracle says today, so that neither changes unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import as_file, files

import numpy as np
import torch
from torch import Tensor

from ml4core_conformance.cache_inputs import SCALE, Role, tie_free
from ml4core_conformance.oracle.layouts import byte_layout

BLOCKS = 2


def block_size(role: Role, id: str) -> int:
    """Tokens of a golden page of a layout."""
    return max(64, byte_layout(role, id).multiple)


def slots_of(size: int) -> tuple[int, ...]:
    """First and last of a page, and either side of a tile of 16 tokens."""
    return (0, 15, 16, 37, size - 1, size, 2 * size - 1)


@dataclass(frozen=True)
class Golden:
    """Two pages of a layout in which some rows were written; all other bytes are 0.

    Attributes:
        rows: fp32 [n, width], exact in bfloat16.
        slots: int64 [n].
        scale: of the whole cache; 1 where the layout has none.
        pages: uint8 [blocks, bytes of a page].
    """

    rows: Tensor
    slots: Tensor
    scale: float
    pages: Tensor


def file_name(role: Role, id: str) -> str:
    return f"{role}.{id}.npz"


def build(role: Role, id: str) -> Golden:
    """What the oracle says now."""
    layout = byte_layout(role, id)
    size = block_size(role, id)
    slots = torch.tensor(slots_of(size))
    rows = _rows(len(slots), layout.width)
    scale = SCALE if layout.scaled else 1.0
    rows = tie_free(rows, id)
    pages = torch.zeros(BLOCKS, size * layout.token_bytes, dtype=torch.uint8)
    layout.put(pages, size, slots, layout.encode(rows, scale))
    return Golden(rows, slots, scale, pages)


def load(role: Role, id: str) -> Golden:
    """What the file says. ``FileNotFoundError`` if there is none for that layout."""
    with as_file(files(__package__) / file_name(role, id)) as path, np.load(path) as stored:
        return Golden(
            torch.from_numpy(stored["rows"]),
            torch.from_numpy(stored["slots"]),
            float(stored["scale"]),
            torch.from_numpy(stored["pages"]),
        )


def _rows(count: int, width: int) -> Tensor:
    """Numbers of 8 significant bits from 2^-8 to 2^4 of both signs, by integer arithmetic alone;
    the tiles of 128 differ in size, and the last row is zero.
    """
    number = np.arange(count * width, dtype=np.int64) * 2654435761 % 2**32
    mixed = (number ^ (number >> 15)) % 2**31 * 2246822519 % 2**32
    fraction = (128 + (mixed >> 8) % 128).astype(np.float64) / 128
    tile = (np.arange(count * width) % width // 128) * 2 - 3
    exponent = ((mixed >> 16) % 6) - 5 + tile
    sign = np.where((mixed >> 30) & 1, -1.0, 1.0)
    rows = (sign * np.ldexp(fraction, exponent)).reshape(count, width)
    rows[-1] = 0
    return torch.from_numpy(rows.astype(np.float32))
