"""A checkpoint's weights become those of a run: training goes on from what is shipped."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from ml4core.models.errors import CheckpointError
from tools.train_tiny import commands, state
from tools.train_tiny.draft import Drafter
from tools.train_tiny.export import export
from tools.train_tiny.model import TinyModel
from tools.train_tiny.read import read_decoder, read_drafter
from tools.train_tiny.rounding import round_


@pytest.fixture
def trained(shape, scramble):
    model, drafter = TinyModel(shape.model), Drafter(shape.draft)
    scramble(model, 1)
    scramble(drafter, 2)
    return model, drafter


def test_what_was_exported_comes_back(trained, shape, tmp_path):
    model, drafter = trained
    folder = export(model, drafter, shape, tmp_path / "out", "fp32")
    again, drafts = TinyModel(shape.model), Drafter(shape.draft)
    read_decoder(folder, again)
    read_drafter(folder, drafts)
    for one, other in ((model, again), (drafter, drafts)):
        for name, value in one.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name


def test_fp8_comes_back_as_training_saw_it(trained, shape, tmp_path):
    model, drafter = trained
    folder = export(model, drafter, shape, tmp_path / "out", "fp8_block")
    again = TinyModel(shape.model)
    read_decoder(folder, again)
    round_(model)
    for name, value in model.state_dict().items():
        # Vectors and plain matrices are bf16 in the file, of 8 bits.
        assert torch.allclose(again.state_dict()[name], value, rtol=2**-8, atol=1e-30), name


def test_a_run_begins_with_a_checkpoint(trained, shape, tmp_path, monkeypatch):
    model, drafter = trained
    monkeypatch.setattr(commands, "load_shape", lambda name: shape)
    folder = export(model, drafter, shape, tmp_path / "out", "fp32")
    args = Namespace(shape="tiny", checkpoint=folder, run=tmp_path / "run", phase="main")
    commands.read(args, 0.0)
    found = state.load(args.run / "main.pt")
    assert found["step"] == 0
    assert torch.equal(found["modules"]["model"]["embedding"], model.embedding)
    assert (args.run / "draft.pt").is_file()


def test_a_checkpoint_of_another_shape_is_refused(trained, shape, tmp_path):
    model, drafter = trained
    folder = export(model, drafter, shape, tmp_path / "out", "fp32")
    wide = type(shape)({**shape.params, "vocab_size": 512})
    with pytest.raises(CheckpointError, match="tok_embeddings"):
        read_decoder(folder, TinyModel(wide.model))
