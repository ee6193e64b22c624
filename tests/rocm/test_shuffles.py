"""Byte orders of AITER's experts, against bytes that its own functions (release 0.1.21) made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ml4core_rocm import shuffles

GOLDEN = Path(__file__).parent / "golden" / "shuffles.npz"


def counted(*shape: int) -> torch.Tensor:
    """Bytes that tell their place, as far as a byte can."""
    place = torch.arange(int(np.prod(shape)))
    return ((place * 167 + (place // 256) * 59 + (place // 65536) * 31) % 251).byte().view(shape)


WEIGHT, SCALE = counted(2, 64, 128), counted(128, 8)
ORDERS: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
    "tiled": (WEIGHT, shuffles.tiled),
    "tiled_gated": (WEIGHT, shuffles.tiled_gated),
    "tiled_wide": (WEIGHT, shuffles.tiled_wide),
    # Padded to 256 rows; the rest of AITER's is what the memory held.
    "tiled_scales": (SCALE, lambda scale: shuffles.tiled_scales(scale)[:128]),
    "tiled_scales_gated": (SCALE, lambda scale: shuffles.tiled_scales_gated(scale, 2)),
    "tiled_scales_wide": (SCALE, lambda scale: shuffles.tiled_scales_wide(scale, 2)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_bytes_are_those_of_the_library(name: str) -> None:
    given, order = ORDERS[name]
    with np.load(GOLDEN) as golden:
        assert sorted(golden) == sorted(ORDERS)
        assert torch.equal(order(given), torch.from_numpy(golden[name]))


@pytest.mark.parametrize("shape", [(1, 32, 64), (3, 96, 128)])
def test_every_order_is_undone(shape: tuple[int, int, int]) -> None:
    weight = counted(*shape)
    assert torch.equal(shuffles.untiled(shuffles.tiled(weight)), weight)
    assert torch.equal(shuffles.untiled_gated(shuffles.tiled_gated(weight)), weight)
    experts, rows, _ = shape
    for groups in (5, 8):
        scale = counted(experts * rows, groups)
        tiled = shuffles.tiled_scales(scale)
        assert (tiled.shape[0] % 256, tiled.shape[1] % 8) == (0, 0)
        assert torch.equal(shuffles.untiled_scales(tiled, *scale.shape), scale)
        assert int(tiled.long().sum()) == int(scale.long().sum())  # B036: padded with zeros
        gated = shuffles.tiled_scales_gated(scale, experts)
        assert torch.equal(shuffles.untiled_scales_gated(gated, experts, groups), scale)


def test_orders_differ() -> None:
    """A reader of one order can't take another's bytes for its own."""
    found = [order(given) for given, order in ORDERS.values()]
    for one in range(len(found)):
        for other in range(one):
            same = found[one].shape == found[other].shape and torch.equal(found[one], found[other])
            names = {list(ORDERS)[one], list(ORDERS)[other]}
            # The second product's weights lie alike in both; and its scales, where nothing is
            # padded.
            alike = ({"tiled", "tiled_wide"}, {"tiled_scales", "tiled_scales_wide"})
            assert same == (names in alike)


def test_sizes_that_tiles_do_not_divide() -> None:
    with pytest.raises(ValueError, match="multiples of 16 rows and 32 bytes; the weight has 24"):
        shuffles.tiled(torch.zeros(1, 24, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="64 bytes"):
        shuffles.tiled_gated(torch.zeros(1, 32, 32, dtype=torch.uint8))
    with pytest.raises(ValueError, match="48 rows each"):
        shuffles.tiled_scales_gated(torch.zeros(96, 8, dtype=torch.uint8), 2)
    with pytest.raises(ValueError, match=r"\[2, 32, 8\]"):
        shuffles.tiled_scales(torch.zeros(2, 32, 8, dtype=torch.uint8))
