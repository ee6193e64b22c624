"""Top-k of a row by many programs: what each of the three launches has to get right."""

from __future__ import annotations

import pytest
import torch

pytestmark = [  # what numpy says of the interpreter's ways
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

COLUMNS, K, BLOCK = 4203, 300, 16
VISIBLE = (COLUMNS, 2051, K + 1, K, 17, 0, 2 * COLUMNS)
"""Whole, ragged, about k, nearly none, none, and told to be longer than it is."""


def scores_of(kind: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(5)
    scores = torch.randn(len(VISIBLE), COLUMNS, generator=draw)
    if kind == "tied":  # at the border, with zeros of both signs below it
        scores = torch.where(scores > 1.0, 1.0, 0.0 * scores)
    elif kind == "crowded":  # more reach the floor than the list holds, and no two are the same
        scores = scores.abs() + 10.0 * (torch.arange(COLUMNS) % 1024 < 290)
    elif kind == "gathered":  # all that is chosen, and more, in one stretch
        scores += 10.0 * (torch.arange(COLUMNS) // 600 == 1)
    elif kind == "broken":
        scores[:, ::3] = float("nan")
        scores[:, 1::3] = float("-inf")
        scores[:, 5] = float("inf")
        scores[1] = float("nan")
    return scores


@pytest.mark.parametrize("kind", ["normal", "tied", "crowded", "gathered", "broken"])
def test_a_row_spread_over_programs(device: torch.device, kind: str) -> None:
    from ml4core_cuda.kernels import topk as module
    from ml4core_cuda.tuned import forced

    scores, rows = scores_of(kind), len(VISIBLE)
    draw = torch.Generator().manual_seed(6)
    table = torch.randperm(rows * 263, generator=draw).view(rows, 263).int()
    request = torch.randperm(rows, generator=draw)
    visible = torch.tensor(VISIBLE, dtype=torch.int32)
    sizes = {"parts": 4, "warps": 4, "ends": 4}
    with forced("topk", module.shape_key(rows, COLUMNS, K), sizes):
        found = module.choose(
            *(scores.to(device), visible.to(device), K, table.to(device), request.to(device)), BLOCK
        )
    assert found.slots is not None
    for t, own in enumerate(scores):
        numbers = (~own[: VISIBLE[t]].isnan()).nonzero()[:, 0]
        order = torch.sort(own[numbers].double() + 0.0, descending=True, stable=True)[1][:K]
        want = numbers[order].sort()[0].tolist()
        rest = [-1] * (K - len(want))
        slots = [int(table[request[t], p // BLOCK]) * BLOCK + p % BLOCK for p in want]
        assert found.positions[t].tolist() == want + rest, t
        assert found.slots[t].tolist() == slots + rest, t
        assert int(found.lens[t]) == len(want), t
        assert bool(found.has_nan[t]) == bool(own[: VISIBLE[t]].isnan().any()), t


def test_stretches_of_several_tiles_and_more_than_a_list_holds(device: torch.device) -> None:
    """Ascending scores, so that what is chosen lies in a last tile; and one long tie."""
    from ml4core_cuda.kernels import topk as module
    from ml4core_cuda.tuned import forced

    columns, k = 9000, 40
    scores = torch.arange(columns).float().repeat(2, 1)
    scores[1, 3000:] = 7000.0  # longer than any list
    visible = torch.tensor([columns, columns], dtype=torch.int32)
    with forced("topk", module.shape_key(2, columns, k), {"parts": 2, "warps": 4}):
        positions, lens, nans = module.topk(scores.to(device), visible.to(device), k)
    assert positions.tolist() == [
        list(range(columns - k, columns)),
        list(range(3000, 3000 + k)),
    ]
    assert lens.tolist() == [k, k]
    assert nans.tolist() == [False, False]


def test_few_long_rows_are_spread_by_default() -> None:
    from ml4core_cuda.kernels.topk import tiling

    assert [tiling(rows, 1 << 16, 132).parts for rows in (1, 4, 64, 100, 300)] == [128, 64, 4, 2, 0]
    assert [tiling(1, columns, 132).parts for columns in (4096, 1 << 20)] == [0, 128]
