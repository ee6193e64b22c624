"""Honest attention of another make passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import KVCache
from ml4core_conformance.check import Status
from ml4core_conformance.judge import judge
from ml4core_conformance.subject import Subject

from .wrapped import CHECKS, Op, backend


def _tensor_cores(op: Op) -> Op:
    """Attention as matrix units do it: operands in bfloat16, sums in fp32, base-2 exponentials of
    tiles of 64 keys.
    """

    def attend(q: Tensor, cache: KVCache, slots: Tensor, lens: Tensor, scale: float) -> Any:
        rows = cache.layout.unpack(cache.parts, cache.scale).flatten(0, 1).bfloat16().float()
        count = rows.shape[0]
        valid = (slots >= 0) & (slots < count)
        valid &= torch.arange(slots.shape[1]) < lens.unsqueeze(-1)
        heads, factor = q.shape[1], scale * math.log2(math.e)
        top = torch.full((q.shape[0], heads, 1), -1e30)
        total = torch.zeros(q.shape[0], heads, 1)
        out = torch.zeros(q.shape[0], heads, 512)
        for start in range(0, slots.shape[1], 64):
            seen = valid[:, start : start + 64]
            index = torch.where(seen, slots[:, start : start + 64], 0).long()
            keys = torch.where(seen.unsqueeze(-1), rows[index], 0.0)
            scores = factor * (q.float() @ keys[..., : q.shape[-1]].transpose(1, 2))
            scores = torch.where(seen.unsqueeze(1), scores, -math.inf)
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, fade = torch.exp2(scores - new), torch.exp2(top - new)
            total = total * fade + weights.sum(-1, keepdim=True)
            out = out * fade + weights.bfloat16().float() @ keys[..., :512]
            top = new
        lse = (top + torch.log2(total)).squeeze(-1) * math.log(2)
        lse = torch.where(total.squeeze(-1) == 0, -math.inf, lse)
        return (out / torch.where(total == 0, 1.0, total)).to(q.dtype), lse

    return attend


FAMILIES = ("ops.anomalies", "ops.elements", "ops.structure", "ops.bias", "ops.lse", "ops.merge")


@pytest.fixture(scope="module")
def unit() -> Iterator[Subject]:
    """Families judge what is made of each case but once."""
    honest = backend({"sparse_mla": _tensor_cores})
    subject = Subject(honest, honest.probe().devices[0])  # type: ignore[arg-type]
    yield subject
    subject.close()


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_honest_matrix_units_pass(unit: Subject, family: str, layout: str) -> None:
    found = judge(unit, CHECKS[f"{family}[sparse_mla/{layout}+bf16]"])
    assert (found.status, found.reason) == (Status.PASS, "")
