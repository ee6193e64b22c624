"""Training sees the values that the shipped format holds."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

from ml4core.formats.fp8_block import dequantize_weight
from ml4core.models.quantize import quantize
from ml4core.models.quantize_options import QuantizeOptions
from tools.train_tiny.draft import Drafter
from tools.train_tiny.export import decoder_tensors, draft_tensors, export
from tools.train_tiny.model import TinyModel
from tools.train_tiny.phases import DraftPhase, Settings, SparsePhase
from tools.train_tiny.rounding import round_, rounded


@pytest.fixture
def pair(shape, scramble) -> tuple[TinyModel, Drafter]:
    torch.manual_seed(3)
    made = TinyModel(shape.model), Drafter(shape.draft)
    for module in made:
        scramble(module, 4)
    return made


def test_rounded_weights_are_those_that_quantising_stores(pair, shape, tmp_path):
    model, drafter = pair
    export(model, drafter, shape, tmp_path / "plain", "fp32")
    options = QuantizeOptions(to="fp8_block", include_output=True, include_drafter=True)
    quantize(tmp_path / "plain", tmp_path / "shipped", options)
    stored = load_file(tmp_path / "shipped" / "consolidated.safetensors")
    for module in pair:
        round_(module)
    fp8 = 0
    for name, value in (*decoder_tensors(model), *draft_tensors(drafter)):
        want = stored[name]
        scale = stored.get(f"{name}_scale")
        if scale is not None:
            want = dequantize_weight(want, scale)
            fp8 += 1
        assert torch.equal(value.detach().to(want.dtype), want), name
    assert fp8 > 100


def test_what_learns_is_not_rounded(pair):
    for module in pair:
        before = copy.deepcopy(module.state_dict())
        with rounded(module):
            changed = [n for n, p in module.named_parameters() if not torch.equal(p, before[n])]
        assert len(changed) > 10
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_the_last_phases_see_rounded_weights(pair, shape, corpus):
    model, drafter = pair
    before = [p.detach().clone() for p in (*model.parameters(), *drafter.parameters())]
    settings = Settings(4, batch=2, length=32, warm_up=1)
    sparse = SparsePhase(settings, corpus, model)
    with sparse.as_shipped(0):
        loss, _ = sparse.loss(0)
        loss.backward()
    plain, _ = sparse.loss(0)
    assert loss.item() != plain.item()
    draft = DraftPhase(settings, corpus, model, drafter)
    found = []
    for step in (0, 2):
        with draft.as_shipped(step):
            found.append(draft.loss(0)[0].item())
    assert found[0] != found[1]
    after = (*model.parameters(), *drafter.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
