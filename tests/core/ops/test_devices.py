"""Ops make all they need on the device of their arguments, and never wait for it.

A fake device stands for any: it refuses to mix devices and to hand over data, and computes nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ml4core.compose.ops import COMPOSED

from .support import Draw
from .test_export import CASES, Call

DEVICE = "meta"


@pytest.mark.parametrize("case", CASES)
def test_ops_stay_on_their_device(case: str) -> None:
    call = Call(COMPOSED[case.split("/")[0]], CASES[case](Draw(1)))

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)

    with FakeTensorMode():
        results = call(*pytree.tree_map(moved, call.pick(call.args)))
    found = [x.device.type for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]
    assert set(found) <= {DEVICE}
    assert found or "write" in case
