"""Where a model looks when it tells a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tools.train_tiny.diagnose import diagnose, documents, told_at
from tools.train_tiny.model import TinyModel


def test_the_place_of_a_told_number_is_found(needles, corpus):
    for ids, answer, told in documents(needles, corpus, 200, 6, seed=1, numbers=3):
        assert told + 4 <= answer.start
        assert torch.equal(ids[0, told : told + 4], ids[0, answer])
        assert ids[0, told - 1] == 90, "told in a sentence"
        assert ids[0, told - 2] == ids[0, answer.start - 1], "of the same key"
    with pytest.raises(ValueError, match="not told before"):
        told_at(np.arange(50), slice(20, 24))


def test_attention_and_choices_are_measured(shape, needles, corpus):
    torch.manual_seed(0)
    model = TinyModel(shape.model).requires_grad_(False)
    found = diagnose(model, needles, corpus, 200, 2, torch.float32)
    layers = [value for name, value in found.items() if name.startswith("layer")]
    assert len(layers) == len(shape.model.layers)
    for own, all_four in layers:
        assert 0 < own < all_four < 0.5, "an untrained head looks everywhere"
    owners = {name: value for name, value in found.items() if name.startswith("owner")}
    assert len(owners) == len(shape.model.index_owners)
    for owner in model.spec.index_owners:
        model.indexer(owner).topk = 200
    wide = diagnose(model, needles, corpus, 200, 2, torch.float32)
    assert all(wide[name] == [1.0, 1.0] for name in owners)
    assert any(value != [1.0, 1.0] for value in owners.values())
