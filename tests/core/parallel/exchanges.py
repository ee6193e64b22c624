"""Calls of each collective, and a prompt: what threads and processes do alike."""

from __future__ import annotations

import pytest
import torch

from ml4core.api import Collectives

PROMPT = list(range(7, 300, 9))


def given(rank: int) -> torch.Tensor:
    return torch.arange(12.0).view(2, 6) + 100 * rank


def calls(ranks: Collectives) -> dict[str, torch.Tensor]:
    x, found = given(ranks.rank), {}
    for dim in (0, 1, -1):
        found[f"gather {dim}"] = ranks.all_gather(x, dim)
        found[f"scatter {dim}"] = ranks.reduce_scatter(x, dim)
        found[f"exchange {dim}"] = ranks.all_to_all(x, dim)
    found["sum"] = ranks.all_reduce(x.T)
    found["bf16"] = ranks.all_reduce(x.bfloat16())
    found["integers"] = ranks.all_gather(torch.tensor([ranks.rank]))
    assert torch.equal(x, given(ranks.rank)), "an input was changed"
    with pytest.raises(ValueError, match="don't divide among 2 ranks"):
        ranks.all_to_all(torch.ones(3))
    return found
