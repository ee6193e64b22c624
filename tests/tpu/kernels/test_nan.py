"""What isn't a number shows: a maximum that answers 0 to NaN, or a sum taken for none, would hide a
broken row behind a plausible answer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ml4core_tpu import torch_ops
from ml4core_tpu.layouts import lane33_layout, tiles_layout

PAGE = 128
SCALE = torch.tensor([0.5])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def scores(place: str) -> torch.Tensor:
    """Of three rows of one request; row 1, or key 7 of page 1, has a NaN."""
    torch.manual_seed(0)
    q, weights = torch.randn(3, 4, 128), torch.randn(3, 4)
    rows = torch.randn(2, PAGE, 128)
    broken: dict[str, Any] = {"query": q[1, 2], "weight": weights[1], "key": rows[1, 7]}
    broken[place][1] = torch.nan
    (keys,) = lane33_layout().pack(rows, None)
    table, starts, visible = ints(1).view(1, 1), ints(0, 3), ints(10, 10, 10)
    found: torch.Tensor = torch_ops.indexer_logits(
        q, weights, keys, table, starts, visible, "lane33", 3, 0.1
    )
    return found


@pytest.mark.parametrize("place", ["query", "weight", "key"])
def test_scores_tell(place: str) -> None:
    found = scores(place)
    told = torch_ops.topk(found, ints(10, 10, 10), 8)[2].tolist()
    assert told == ([True] * 3 if place == "key" else [False, True, False])
    assert (torch_ops.topk(found, ints(5, 5, 5), 4)[2].tolist()) == [
        False,
        place != "key",
        False,
    ]


@pytest.mark.parametrize("column", [3, 560])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_tells(column: int, dtype: torch.dtype) -> None:
    """In the latent part and in the rope part; only for the row that attends to the key."""
    torch.manual_seed(0)
    rows = torch.randn(2, PAGE, 576)
    rows[1, 7, column] = torch.nan
    parts = list(tiles_layout().pack(rows, SCALE))
    q = torch.randn(2, 4, 576).to(dtype)
    slots = ints(PAGE + 7, 3, 4, 3, 4, 5).view(2, 3)
    sparse = torch_ops.sparse_mla(q, parts, SCALE, slots, ints(3, 3), "tiles", 512, 0.1)
    table, starts, visible = ints(1, 0).view(2, 1), ints(0, 1, 2), ints(9, 3)
    window = torch_ops.window_mla(
        q, parts, SCALE, table, starts, visible, "tiles", 512, 64, 1, 0.1, 0
    )
    for out, lse in (sparse, window):
        assert out[0].isnan().all()
        assert lse[0].isnan().all()
        assert out[1].isfinite().all()
        assert lse[1].isfinite().all()
