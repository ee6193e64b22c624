"""Frequencies against written-out values, and against an independent implementation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ml4core.api import RopeSpec, YarnSpec
from ml4core.models.rope_freqs import inv_freq, yarn_range

PLAIN = RopeSpec(dim=64, theta=1e4)
YARN = RopeSpec(dim=64, theta=1e4, yarn=YarnSpec(factor=36.0, original_max_position=8192))


def test_range_of_the_ramp() -> None:
    assert YARN.yarn is not None
    assert yarn_range(YARN.yarn, 64, 1e4) == (12, 25)


@pytest.mark.parametrize(
    ("pair", "value"),
    [(0, 1.0), (12, 0.0316227766), (13, 0.0219402738), (16, 0.00700854701), (31, 3.7042262e-6)],
)
def test_written_out_values(pair: int, value: float) -> None:
    assert float(inv_freq(YARN)[pair]) == pytest.approx(
        value, rel=7e-8
    )  # half a unit in the last place of fp32


def test_without_yarn() -> None:
    wanted = torch.tensor([1e4 ** (-2 * j / 64) for j in range(32)], dtype=torch.float64)
    result = inv_freq(PLAIN)
    assert result.dtype == torch.float32
    assert torch.equal(result, wanted.float())


@pytest.mark.parametrize("factor", [1.0, 4.0, 36.0, 128.0])
@pytest.mark.parametrize("original", [1024, 8192, 16384])
def test_against_transformers(factor: float, original: int) -> None:
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = PretrainedConfig(
        hidden_size=64,
        num_attention_heads=1,
        head_dim=64,
        max_position_embeddings=int(original * factor),
    )
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
    }
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    ours = inv_freq(replace(PLAIN, yarn=YarnSpec(factor, original)))
    torch.testing.assert_close(ours, theirs.float(), rtol=2e-6, atol=0)


def test_magnitude_flag_leaves_frequencies_alone() -> None:
    assert YARN.yarn is not None
    flagged = replace(YARN, yarn=replace(YARN.yarn, apply_scale=True))
    assert torch.equal(inv_freq(YARN), inv_freq(flagged))


def test_ramp_that_is_a_step() -> None:
    # With equal rotations the range has one pair, and no division by zero.
    spec = replace(YARN, yarn=YarnSpec(2.0, 8192, beta_fast=1.0001, beta_slow=1.0))
    ratio = inv_freq(spec) / inv_freq(PLAIN)
    assert bool(ratio.isfinite().all())
    assert set(ratio[:24].tolist()) == {1.0}
    assert set(ratio[26:].tolist()) == {0.5}


def test_storages_of_learned_frequencies_mean_the_same() -> None:
    factors = torch.linspace(0.5, 1.5, 32, dtype=torch.float64)
    base = torch.tensor([1e4 ** (-2 * j / 64) for j in range(32)], dtype=torch.float64)
    stored = {
        "multiplier": factors,
        "log": factors.log(),
        "absolute": factors * base,
    }
    wanted = inv_freq(YARN).double() * factors
    for storage, learned in stored.items():
        result = inv_freq(replace(YARN, lerope=storage), learned)
        torch.testing.assert_close(result.double(), wanted, rtol=2e-7, atol=0)


def test_a_factor_of_one_changes_nothing() -> None:
    spec = replace(YARN, lerope="multiplier")
    assert torch.equal(inv_freq(spec, torch.ones(32)), inv_freq(YARN))
    spec = replace(YARN, lerope="log")
    assert torch.equal(inv_freq(spec, torch.zeros(32)), inv_freq(YARN))


def test_learned_frequencies_must_fit() -> None:
    learned = replace(YARN, lerope="multiplier")
    with pytest.raises(ValueError, match="'multiplier', but none was given"):
        inv_freq(learned)
    with pytest.raises(ValueError, match=r"'none', but a tensor \[32\] was given"):
        inv_freq(YARN, torch.ones(32))
    with pytest.raises(ValueError, match=r"\[16\], wanted \[32\]"):
        inv_freq(learned, torch.ones(16))
    bad = torch.ones(32)
    bad[5] = float("nan")
    with pytest.raises(ValueError, match="frequency 5 of 32 gives nan"):
        inv_freq(learned, bad)
