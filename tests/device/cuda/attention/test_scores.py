"""Scores of the indexer as the select stage asks for them: what a row doesn't see isn't filled."""

from __future__ import annotations

import pytest
import torch

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

BLOCK, WIDTH = 64, 128
SEEN = (16, 63, 64, 65, 70, 130)


def _keys(table: torch.Tensor, blocks: int, draw: torch.Generator) -> KVCache:
    """Keys of every token that is seen; all that isn't written is NaN."""
    layout = index_layout("planar_f32")
    (part,) = layout.pack(torch.randn(blocks, BLOCK, WIDTH, generator=draw), None)
    pages = part.view(blocks, -1)
    written = torch.zeros(blocks, BLOCK, dtype=torch.bool)
    for row, seen in enumerate(SEEN):
        for page in range(-(-seen // BLOCK)):
            written[int(table[row, page]), : min(BLOCK, seen - page * BLOCK)] = True
    codes = pages[:, : BLOCK * WIDTH].view(blocks, BLOCK, WIDTH)
    scales = pages[:, BLOCK * WIDTH :].view(blocks, BLOCK, 4)
    codes[~written] = 0x7F
    scales[~written] = 0xFF
    return KVCache(layout, BLOCK, (part,))


@pytest.mark.parametrize("heads", [4, 32, 64])
def test_short_contexts_meet_only_what_was_written(heads: int, device: torch.device) -> None:
    from ml4core_cuda.kernels.indexer_logits import scores
    from ml4core_cuda.measure.judges import logits_error

    draw = torch.Generator().manual_seed(heads)
    rows, pages = len(SEEN), 5
    blocks = 1 + 3 * rows
    used = 1 + torch.randperm(3 * rows, generator=draw).view(rows, 3).int()
    # Pages that no token has are none, or numbers that no cache has.
    table = torch.full((rows, pages), -1, dtype=torch.int32)
    table[:, 3:] = 2**31 - 1
    for row, seen in enumerate(SEEN):
        held = -(-seen // BLOCK)
        table[row, :held] = used[row, :held]
    cache = _keys(table, blocks, draw)
    cache = KVCache(cache.layout, BLOCK, tuple(part.to(device) for part in cache.parts))
    q = torch.randn(rows, heads, WIDTH, generator=draw).to(device)
    weights = torch.randn(rows, heads, generator=draw).to(device)
    visible = torch.tensor(SEEN, dtype=torch.int32, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    for _ in range(2):
        found = scores(
            q, weights, 0.01, cache, table.to(device), starts, visible, 1, fill=False
        )  # fmt: skip
        judged = table.clamp(0, blocks - 1).to(device)
        assert logits_error((q, weights, 0.01, cache, judged, starts, visible, 1), found) < 1.0
