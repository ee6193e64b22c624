"""The training graph computes what the project's own forward computes on the exported weights."""

from __future__ import annotations

import pytest
import torch

from ml4core.api import DraftPlan, DraftWeights, KVCache, Sampling
from ml4core.api.known_layouts import latent_layout
from ml4core.compose.context import StageContext
from ml4core.compose.draft import draft_block
from ml4core.compose.ops import COMPOSED
from ml4core.engine.collectives import SingleRank
from ml4core.models.dspark_weights import load_draft
from tools.train_tiny.draft import Drafter
from tools.train_tiny.export import export
from tools.train_tiny.model import TinyModel

LENGTH = 90  # of a top-k of 16, beyond the context that YaRN stretches
BOUND = 1e-4


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (1, count), generator=generator)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The worst row's largest difference, relative to its largest value."""
    assert got.shape == want.shape
    return ((got - want).abs().amax(-1) / want.abs().amax(-1)).max().item()


@pytest.fixture
def model(shape, scramble):
    torch.manual_seed(3)
    model = TinyModel(shape.model).requires_grad_(False)
    scramble(model, 4)
    model.stretch(True)
    return model


@pytest.fixture
def drafter(shape, scramble):
    torch.manual_seed(5)
    drafter = Drafter(shape.draft).requires_grad_(False)
    scramble(drafter, 6)
    return drafter


def test_sparse_logits_equal_the_served_ones(model, shape, serve, tmp_path):
    served = serve(export(model, None, shape, tmp_path / "out", "fp32"))
    ids = tokens(LENGTH)
    want = served.step(ids[0].tolist()).logits
    got = model.logits(model(ids, sparse=True).hidden)[0]
    assert error(got, want) < BOUND
    dense = model.logits(model(ids).hidden)[0]
    assert error(dense[:16], want[:16]) < BOUND, "up to the top-k every key is chosen"
    assert error(dense, want) > 0.01, "selection has no influence: it is not tested here"


def test_dense_logits_equal_those_of_a_wide_selection(model, shape, serve, tmp_path, scramble):
    wide = {**shape.params, "indexer": {**shape.params["indexer"], "topk": 128}}
    served = serve(export(model, None, type(shape)(wide), tmp_path / "out", "fp32"))
    ids = tokens(LENGTH)
    got = model.logits(model(ids).hidden)[0]
    assert error(got, served.step(ids[0].tolist()).logits) < BOUND


def test_drafts_equal_the_served_ones(model, drafter, shape, serve, tmp_path):
    served = serve(export(model, drafter, shape, tmp_path / "out", "fp32"))
    ids = tokens(70)
    taps = served.step(ids[0].tolist()).taps
    found = model(ids, sparse=True, taps=shape.draft.taps)
    for mine, theirs in zip(found.taps, taps, strict=True):
        assert error(mine[0], theirs) < BOUND
    anchors = torch.tensor([[1, 2, 17, 39, 40, 41, 42, 60, 66]])  # about a window of 40
    got = drafter.logits(
        drafter.blocks(model.embedding, found.taps, ids, anchors),
        model.output,
        None,
        ids.gather(1, anchors),
    )[0]
    for i, anchor in enumerate(anchors[0].tolist()):
        want = served_drafts(served, ids[0], anchor, [tap[:anchor] for tap in taps])
        assert error(got[i], want) < BOUND, f"anchor {anchor}"


def served_drafts(served, ids, anchor, taps):
    """Logits [depth, vocab] of one block, by the project's composition."""
    spec = served.spec
    draft = spec.draft
    top, *layers = (weights for _, weights in load_draft(served.checkpoint, draft, torch.float32))
    ours = served.runner.weights.top
    top = {**top, "embedding": ours["embedding"], "output": ours["output"]}
    call = draft_block(StageContext(spec, None, COMPOSED, SingleRank(), torch.float32), {})
    layout = latent_layout("fp32", draft.layers[0].kv_lora_rank, draft.layers[0].rope_dim)
    caches = [
        KVCache(layout, 16, layout.pack(torch.zeros(8, 16, layout.width), None))
        for _ in draft.layers
    ]
    positions = torch.arange(anchor)
    plan = DraftPlan(
        positions,
        positions + 16,  # the first page is the null page
        ids[anchor : anchor + 1],
        torch.arange(anchor, anchor + draft.depth).unsqueeze(0) + 16,
        torch.arange(1, 8, dtype=torch.int32).unsqueeze(0),
        Sampling(torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.tensor([anchor])),
    )
    return call(DraftWeights(top, tuple(layers)), plan, caches, taps).logits[0]


def test_the_given_tokens_before_each_row_steer_the_head(model, drafter, shape):
    """Teacher forcing with the drafter's own choices gives its own logits."""
    ids = tokens(50)
    taps = model(ids, taps=shape.draft.taps).taps
    anchors = torch.tensor([[5, 20]])
    blocks = drafter.blocks(model.embedding, taps, ids, anchors)
    first = ids.gather(1, anchors)
    free = drafter.logits(blocks, model.output, None, first)
    own = free.argmax(-1)
    previous = torch.cat((first.unsqueeze(-1), own[..., :-1]), dim=-1)
    torch.testing.assert_close(drafter.logits(blocks, model.output, previous, first), free)
    other = drafter.logits(blocks, model.output, (previous + 1) % 256, first)
    assert (other - free).abs().max() > 1e-2
