"""Each phase lowers its loss; a run in parts is the same run."""

from __future__ import annotations

import copy
import math
import os
import signal
import time

import numpy as np
import pytest
import torch

from tools.train_tiny import loop, state
from tools.train_tiny.config import dense_params, load_shape
from tools.train_tiny.draft import Drafter
from tools.train_tiny.model import TinyModel
from tools.train_tiny.optim import orthogonalised, rate_factor
from tools.train_tiny.own_words import own_words
from tools.train_tiny.phases import (
    FALL,
    DraftPhase,
    IndexPhase,
    MainPhase,
    Settings,
    SparsePhase,
)

LENGTH = 48
FAR = math.inf


def settings(steps: int, **fields: float) -> Settings:
    return Settings(steps, batch=4, length=LENGTH, warm_up=2, **fields)  # type: ignore[arg-type]


def losses(phase, steps: int, name: str) -> list[float]:
    found = []
    for step in range(steps):
        loss, metrics = phase.loss(step)
        loss.backward()
        phase.optimizers.step(phase.factor(step))
        found.append(metrics[name].item())
    return found


def test_every_phase_lowers_its_loss(shape, corpus):
    torch.manual_seed(0)
    model = TinyModel(shape.model)
    found = losses(MainPhase(settings(60, fall=FALL), corpus, model), 60, "nll")
    assert found[0] > 5.0
    assert np.mean(found[-5:]) < 3.5
    assert model.stretched, "the cooldown turns YaRN on"

    weights = copy.deepcopy(dict(model.core_parameters()))
    found = losses(IndexPhase(settings(40), corpus, model), 40, "kl")
    assert np.mean(found[-5:]) < 0.8 * np.mean(found[:5])
    for name, before in weights.items():
        assert torch.equal(before, dict(model.core_parameters())[name]), name

    found = losses(SparsePhase(settings(20, scale=0.3), corpus, model), 20, "nll")
    assert np.mean(found[-5:]) < np.mean(found[:5])

    drafter = Drafter(shape.draft)
    weights = copy.deepcopy(dict(model.named_parameters()))
    own = own_words(model, corpus, 16, 32, 1, torch.float32)
    phase = DraftPhase(settings(60), corpus, model, drafter, own=own)
    found = losses(phase, 60, "draft")
    assert np.mean(found[-5:]) < 0.8 * np.mean(found[:5])
    assert all(torch.equal(weights[n], p) for n, p in model.named_parameters())


def test_a_run_in_parts_is_the_same_run(shape, corpus, tmp_path):
    def fresh() -> MainPhase:
        torch.manual_seed(0)
        return MainPhase(settings(6), corpus, TinyModel(shape.model))

    assert loop.run(fresh(), tmp_path / "whole", FAR)
    phase = fresh()
    real = phase.loss

    def interrupted(step: int):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(step)

    phase.loss = interrupted  # type: ignore[method-assign]
    assert not loop.run(phase, tmp_path / "parts", FAR)
    assert state.load(tmp_path / "parts" / "main.pt")["step"] == 3
    assert loop.run(fresh(), tmp_path / "parts", FAR)
    one, other = (state.load(tmp_path / name / "main.pt") for name in ("whole", "parts"))
    for name, value in one["modules"]["model"].items():
        assert torch.equal(value, other["modules"]["model"][name]), name


def test_a_part_that_has_no_time_left_saves_and_stops(shape, corpus, tmp_path):
    phase = MainPhase(settings(6), corpus, TinyModel(shape.model))
    assert not loop.run(phase, tmp_path, time.monotonic() + 1)
    assert state.load(tmp_path / "main.pt")["step"] == 0


def test_a_phase_begins_with_weights_that_no_run_left(shape, corpus, tmp_path):
    """Those of `unpack` and `read`, which have no optimizer's state."""
    given = TinyModel(shape.model)
    weights = {"model": given.state_dict()}
    state.save(tmp_path / "main.pt", {"step": 0, "modules": weights})
    phase = MainPhase(settings(6, scale=0.0), corpus, TinyModel(shape.model))
    assert loop.run(phase, tmp_path, FAR)
    found = state.load(tmp_path / "main.pt")
    assert found["step"] == 6
    assert torch.equal(found["modules"]["model"]["output"], given.output)


def test_a_save_that_fails_leaves_the_last_one(tmp_path):
    path = tmp_path / "main.pt"
    state.save(path, {"step": 1})
    with pytest.raises(Exception, match=r"pickle|local"):
        state.save(path, {"step": lambda: None})
    assert state.load(path) == {"step": 1}


def test_packed_weights_come_back_as_bfloat16_holds_them(tmp_path):
    weights = {f"w{i}": torch.randn(20, 10) for i in range(5)}
    paths = state.pack(weights, tmp_path, 1000, "model")
    assert len(paths) == 3  # of 400 bytes each
    for name, tensor in state.unpack(tmp_path, "model").items():
        assert torch.equal(tensor, weights[name].bfloat16().float())


def test_orthogonalised_has_singular_values_of_about_one():
    torch.manual_seed(0)
    for shape in ((2, 16, 40), (1, 40, 16), (3, 8, 8)):
        values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
        assert values.max() < 1.3
        assert values.median() > 0.6


def test_the_rate_rises_stays_and_falls():
    factors = [rate_factor(step, 100, 10, 20) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:80] == [1.0] * 70
    assert factors[-1] == pytest.approx(0.05)


def test_the_baseline_is_as_wide_as_what_a_token_meets():
    shape, dense = load_shape("tiny"), load_shape("dense")
    moe = shape.model.layers[1].moe
    assert moe is not None
    for layer in dense.model.layers:
        assert layer.moe is None
        assert layer.dense_width == moe.topk * moe.expert_width + moe.shared_width
    assert "moe" not in dense_params(shape.params)
    with pytest.raises(ValueError, match="nowhere"):
        load_shape("nowhere")
