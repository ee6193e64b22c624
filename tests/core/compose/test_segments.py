"""Cutting steps into pieces, and laying rows on a grid."""

from __future__ import annotations

import pytest
import torch

from ml4core.compose.grid import Grid
from ml4core.compose.hadamard import hadamard
from ml4core.compose.segments import Piece, pieces
from ml4core.engine.block_pool import BlockPool
from support.stepping import Sequence, build_plan


def mixed_plan():
    pools = {"latent": BlockPool("latent", 400)}
    work = []
    for length, rows in ((30, 1), (9, 1), (4, 1), (20, 3), (17, 3), (40, 33), (12, 12), (7, 5)):
        sequence = Sequence(list(range(length)), length, length - rows)
        sequence.grow(pools, length, 4)
        work.append((sequence, rows))
    return build_plan(work, ("latent",), 4, verify_rows=3, pad_requests=4, pad_rows=60)


@pytest.mark.parametrize("tile", [None, 1, 2, 3, 5, 8, 16, 1000])
def test_pieces_cover_each_row_once_with_its_own_request(tile: int | None) -> None:
    plan = mixed_plan()
    rows: list[int] = []
    for piece in pieces(plan, tile):
        first = piece.rows.start
        rows += range(piece.rows.start, piece.rows.stop)
        starts = piece.query_start.tolist()
        assert len(starts) == piece.requests.stop - piece.requests.start + 1
        assert starts == sorted(starts)
        for local, request in enumerate(range(piece.requests.start, piece.requests.stop)):
            assert starts[local + 1] - starts[local] <= piece.max_rows
            for row in range(starts[local], starts[local + 1]):
                assert int(plan.row_request[first + row]) == request
        covered = set(range(starts[0], starts[-1]))
        for row in range(piece.rows.stop - first):
            if row not in covered:
                assert int(plan.visible[first + row]) == 0
        if tile is not None:
            assert piece.rows.stop - first <= max(tile, 3)
            assert cells(piece) <= max(tile, 3, piece.requests.stop - piece.requests.start)
    assert rows == list(range(plan.shape.rows))


def cells(piece: Piece) -> int:
    """Of the grid that ops lay the piece's rows on."""
    return (piece.requests.stop - piece.requests.start) * piece.max_rows


@pytest.mark.parametrize("lengths", [(100,), (50, 50), (64, 64, 64), (17, 90), (16, 16, 200)])
@pytest.mark.parametrize("pad", [0, 256])
def test_chunks_are_cut_whatever_their_lengths(lengths: tuple[int, ...], pad: int) -> None:
    """One chunk, or several of one length, would pass for windows."""
    pools = {"latent": BlockPool("latent", 400)}
    work = []
    for length in lengths:
        sequence = Sequence(list(range(length)), length)
        sequence.grow(pools, length, 4)
        work.append((sequence, length))
    plan = build_plan(work, ("latent",), 4, pad_rows=pad)
    made = list(pieces(plan, 8))
    assert max(cells(piece) for piece in made) <= 8
    covered = [row for p in made for row in range(p.rows.start, p.rows.stop)]
    assert covered == list(range(plan.shape.rows))
    assert sum(int(p.query_start[-1] - p.query_start[0]) for p in made) == sum(lengths)


def test_a_grid_spreads_rows_and_collects_them_again() -> None:
    start = torch.tensor([0, 3, 3, 4, 9], dtype=torch.int32)
    x = torch.arange(24.0).view(12, 2)  # rows 9 and after belong to no request
    grid = Grid(start, 5)
    cells = grid.spread(x)
    assert cells.shape == (4, 5, 2)
    assert cells[1].eq(0).all()
    assert torch.equal(cells[3], x[4:9])
    assert cells[0, 3:].eq(0).all()
    assert torch.equal(grid.collect(cells, 12)[:9], x[:9])


def test_hadamard_is_the_orthogonal_sylvester_matrix() -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < 128:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    x = torch.randn(5, 3, 128, dtype=torch.float64)
    torch.testing.assert_close(hadamard(x), x @ matrix.T / 128**0.5)
    with pytest.raises(ValueError, match="power of two, got width 96"):
        hadamard(torch.zeros(96))
