"""Attention in tiles on the host: a tile reads the keys that its rows may see, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ml4core.compose.masked_attention import TILE_ROWS, masked_attention

N, W, SCALE = 2, 16, 0.3


def inputs(requests: int, rows: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((requests, N, rows, W), (requests, N, keys, W), (requests, N, keys, W))
    q, k, v = (torch.randn(size, generator=generator) for size in sizes)
    return q, k, v


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) * SCALE
    weights = torch.softmax(scores.masked_fill(~mask.unsqueeze(1), float("-inf")), dim=-1)
    return weights @ v.double()


def causal(rows: int, keys: int, starts: list[int]) -> tuple[Tensor, Tensor]:
    """Mask and ends of requests whose first row has that position."""
    ends = torch.tensor(starts).unsqueeze(1) + 1 + torch.arange(rows)
    return torch.arange(keys) < ends.unsqueeze(-1), ends


@pytest.mark.parametrize("rows", [1, TILE_ROWS, TILE_ROWS + 1, 3 * TILE_ROWS - 5])
def test_it_is_attention_under_the_mask(rows: int) -> None:
    keys = rows + 40
    q, k, v = inputs(2, rows, keys)
    mask, ends = causal(rows, keys, [0, 40])
    found = masked_attention(q, k, v, mask, ends, SCALE)
    torch.testing.assert_close(found.double(), reference(q, k, v, mask), rtol=1e-4, atol=1e-5)


def test_a_mask_with_holes() -> None:
    rows, keys = 150, 170
    q, k, v = inputs(1, rows, keys, seed=1)
    mask, ends = causal(rows, keys, [20])
    holes = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    holes[..., 0] = True
    mask = mask & holes
    found = masked_attention(q, k, v, mask, ends, SCALE)
    torch.testing.assert_close(found.double(), reference(q, k, v, mask), rtol=1e-4, atol=1e-5)


def test_keys_that_no_row_of_a_tile_sees_are_not_read() -> None:
    rows = 2 * TILE_ROWS
    q, k, v = inputs(1, rows, rows)
    mask, ends = causal(rows, rows, [0])
    want = masked_attention(q, k, v, mask, ends, SCALE)
    k[:, :, TILE_ROWS:], v[:, :, TILE_ROWS:] = float("nan"), float("nan")
    found = masked_attention(q, k, v, mask, ends, SCALE)
    assert torch.equal(found[:, :, :TILE_ROWS], want[:, :, :TILE_ROWS])
    assert found[:, :, TILE_ROWS:].isnan().any()


def test_padding_attends_to_the_first_key() -> None:
    q, k, v = inputs(1, 100, 128)
    ends = torch.ones(1, 100, dtype=torch.int64)
    found = masked_attention(q, k, v, torch.arange(128) < ends.unsqueeze(-1), ends, SCALE)
    torch.testing.assert_close(found, v[:, :, :1].expand_as(found))


def test_it_is_one_node_of_a_traced_graph() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, ends: Tensor) -> Tensor:
            return masked_attention(q, k, v, mask, ends, SCALE)

    def arguments(start: int, seed: int) -> tuple[Tensor, ...]:
        return (*inputs(1, 70, 90, seed), *causal(70, 90, [start]))

    traced = torch.export.export(Module(), arguments(0, 3)).module()
    other = arguments(20, 4)
    assert torch.equal(traced(*other), Module()(*other))
