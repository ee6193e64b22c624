"""Golden pages, and the oracle's layouts against published numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ml4core.api.known_layouts import INDEX_IDS, LATENT_IDS, index_layout, latent_layout
from ml4core_conformance import golden
from ml4core_conformance.cases import all_cases
from ml4core_conformance.oracle.layouts import INDEX_LAYOUTS, LATENT_LAYOUTS


@pytest.mark.parametrize(
    ("role", "id"),
    [*(("latent", id) for id in LATENT_LAYOUTS), *(("index", id) for id in INDEX_LAYOUTS)],
)
def test_golden_pages_are_what_the_oracle_writes(role: Any, id: str) -> None:
    made, stored = golden.build(role, id), golden.load(role, id)
    assert torch.equal(made.rows, stored.rows)
    assert torch.equal(made.slots, stored.slots)
    assert made.scale == pytest.approx(stored.scale, rel=1e-7)
    assert torch.equal(made.pages, stored.pages)


def test_the_oracle_knows_every_open_layout() -> None:
    assert set(LATENT_LAYOUTS) == set(LATENT_IDS)
    assert set(INDEX_LAYOUTS) == set(INDEX_IDS)


def test_token_bytes_are_the_published_ones() -> None:
    for id, layout in LATENT_LAYOUTS.items():
        assert layout.token_bytes == latent_layout(id).bytes_per_token
    for id, layout in INDEX_LAYOUTS.items():
        assert layout.token_bytes == index_layout(id).bytes_per_token


def test_tiles_of_16_tokens() -> None:
    """Byte offsets of (token, value) in a page of 64."""
    layout = INDEX_LAYOUTS["tiled16_f32"]
    known = {(0, 15): 15, (0, 16): 256, (1, 0): 16, (15, 127): 2047, (16, 0): 2048, (63, 127): 8191}
    for (token, value), offset in known.items():
        assert layout.offset(value, token, 64) == offset


@pytest.mark.parametrize(
    ("role", "amax", "exponent"),
    [
        *(
            ("index", a, e)
            for a, e in ((0.0, -22), (0.01, -15), (1.0, -8), (3.5, -7), (448.0, 0), (500.0, 1))
        ),
        *(
            ("latent", a, e)
            for a, e in ((0.0, -13), (0.01, -13), (1.0, -8), (3.5, -7), (448.0, 0), (500.0, 1))
        ),
    ],
)
def test_scales_are_the_published_ones(role: str, amax: float, exponent: int) -> None:
    if role == "index":
        token = INDEX_LAYOUTS["planar_f32"].encode(torch.full((1, 128), amax))
        scale = token[:, 128:].view(torch.float32)
    else:
        token = LATENT_LAYOUTS["fp8_ds_mla"].encode(torch.full((1, 576), amax))
        scale = token[:, 512:516].contiguous().view(torch.float32)
    assert float(scale) == 2.0**exponent


def test_cases_of_a_seed_are_the_same() -> None:
    case = next(case for case in all_cases() if case.op == "sparse_mla" and case.name == "hostile")
    one, two, other = case.arguments(0), case.arguments(0), case.arguments(1)
    assert torch.equal(one["slots"], two["slots"])
    assert torch.equal(one["cache"].parts[0], two["cache"].parts[0])
    assert not torch.equal(one["q"], other["q"])
