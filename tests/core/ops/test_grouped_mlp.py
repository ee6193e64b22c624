"""Experts one after the other on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ml4core.compose.ops.gemms import silu_mul
from ml4core.compose.ops.grouped_mlp import grouped_mlp

E, H, I = 5, 24, 16  # noqa: E741

NAN = float("nan")


def weights(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(E, 2 * I, H, generator=generator) * H**-0.5
    w2 = torch.randn(E, H, I, generator=generator) * I**-0.5
    return w13.to(dtype), w2.to(dtype)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 0, 3, 1, 1), (0, 0, 7, 0, 0), (7, 0, 0, 0, 0)])
def test_each_row_goes_through_its_expert(
    sizes: tuple[int, ...], dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    x = torch.randn(4, H, generator=torch.Generator().manual_seed(1)).to(x_dtype)
    rows = torch.tensor([3, 0, 1, 2, 2, 0, 3])
    w13, w2 = weights(dtype)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    found = grouped_mlp(x, rows, w13, w2, ends)
    assert found.dtype == torch.float32
    owner = torch.repeat_interleave(torch.arange(E), torch.tensor(sizes))
    for place, (row, expert) in enumerate(zip(rows.tolist(), owner.tolist(), strict=True)):
        wide = x[row].double()
        inner = silu_mul((w13[expert].double() @ wide).float()).double()
        want = w2[expert].double() @ inner
        torch.testing.assert_close(found[place].double(), want, rtol=1e-4, atol=1e-5)


def test_rows_behind_the_last_end_are_zeros() -> None:
    w13, w2 = weights(torch.float32)
    x = torch.full((2, H), NAN)
    none = torch.zeros(E, dtype=torch.int32)
    assert torch.equal(grouped_mlp(x, torch.tensor([0, 1, 1]), w13, w2, none), torch.zeros(3, H))


def test_transposed_storage_gives_the_same() -> None:
    w13, w2 = weights(torch.float32)
    x = torch.randn(9, H, generator=torch.Generator().manual_seed(2))
    rows, ends = torch.arange(9), torch.tensor([3, 3, 6, 8, 9], dtype=torch.int32)
    laid = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w13, w2)]
    assert not laid[0].is_contiguous()
    torch.testing.assert_close(
        grouped_mlp(x, rows, *laid, ends), grouped_mlp(x, rows, w13, w2, ends)
    )
