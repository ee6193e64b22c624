"""Memory: blocks of rows, never a large tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ml4core.models.checkpoint_writer import CheckpointWriter
from ml4core.models.quantize import QuantizeOptions, quantize
from ml4core.models.quantize_source import BLOCK_BYTES

ROWS, COLUMNS = 24_576, 1024


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation gives."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.nbytes = max(self.nbytes, leaf.untyped_storage().nbytes())
        return result


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "m"
    values = torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, COLUMNS) % 1013 - 500
    with CheckpointWriter(folder) as writer:
        writer.add_json("params.json", {"dim": COLUMNS})
        writer.add("layers.1.experts.0.w1.weight", values.to(torch.bfloat16))
        writer.add("tok_embeddings.weight", values.to(torch.bfloat16))
    return folder


@pytest.mark.parametrize("to", ["mxfp4", "nvfp4", "fp8_block"])
def test_largest_array(large: Path, tmp_path: Path, to: Any) -> None:
    whole = 2 * ROWS * COLUMNS
    assert whole == 12 * BLOCK_BYTES
    with Largest() as there:
        quantize(large, tmp_path / "there", QuantizeOptions(to=to))
    with Largest() as back:
        quantize(tmp_path / "there", tmp_path / "back", QuantizeOptions(to="bf16"))
    for largest in (there, back):
        # bf16 values as fp32, or codes of FP4 on their way to int32: a few bytes to a value.
        assert BLOCK_BYTES // 2 <= largest.nbytes <= 4 * BLOCK_BYTES
        assert largest.nbytes < math.ceil(whole / 2)
