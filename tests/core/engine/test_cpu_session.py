"""What the cpu session keeps of a layer's weights, and what it takes to get there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ml4core.api import Deployment, Session, Weight
from ml4core.api.known_layouts import INDEX_IDS, LATENT_IDS, index_layout, latent_layout
from ml4core.compose.ops.weights import decode_weight, quantize
from ml4core.cpu.backend import CpuBackend
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded_config import PRESETS

SPEC = build_model_spec(PRESETS["micro"].params())
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def session(dtype: str) -> Session:
    backend = CpuBackend()
    return backend.open(Deployment(SPEC, backend.probe().devices[0], dtype))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.size = max(self.size, x.numel() * x.element_size())
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["fp8_block", "fp8_tensor", "nvfp4", "mxfp4"])
def test_a_stack_is_decoded_without_a_second_one(dtype: str, format: str) -> None:
    values = torch.randn(16, 144, 160, generator=torch.Generator().manual_seed(0))
    stack = quantize(values, format)
    opened = session(dtype)
    with Largest() as largest:
        prepared = opened.prepare_weights({"experts_w13": stack}, SPEC.layers[1])["experts_w13"]
    assert isinstance(prepared, Weight)
    assert prepared.shape == (16, 144, 160)
    assert prepared.data.dtype == DTYPES[dtype]
    assert torch.equal(prepared.data, decode_weight(stack, DTYPES[dtype]))
    assert largest.size <= prepared.nbytes


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tied_matrices_have_one_copy(dtype: str, stored: str) -> None:
    table = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(DTYPES[stored])
    format = "fp32" if stored == "float32" else "bf16"
    other = Weight(format, (64, 32), {"data": table.clone()})
    tied = Weight(format, (64, 32), {"data": table})
    opened = session(dtype)
    for output, one in ((tied, True), (other, False)):
        made = opened.prepare_weights({"embedding": table, "output": output}, None)
        assert made["embedding"].dtype == DTYPES[dtype]
        assert made["output"].format == ("fp32" if dtype == "float32" else "bf16")
        assert torch.equal(made["output"].data, made["embedding"])
        assert (made["output"].data.data_ptr() == made["embedding"].data_ptr()) is one


def test_a_cache_that_does_not_fit_says_what_it_takes() -> None:
    layout = latent_layout("fp8_ds_mla")
    with pytest.raises(MemoryError, match=f"takes {10**12 * 64 * 656} bytes in layout fp8_ds_mla"):
        session("float32").alloc_kv(layout, 10**12, 64)


def test_only_layouts_of_one_scale_a_cache_get_one() -> None:
    opened = session("float32")
    scaled = {
        layout.id
        for layout in (
            *(latent_layout(id) for id in LATENT_IDS),
            *(index_layout(id) for id in INDEX_IDS),
        )
        if opened.alloc_kv(layout, 2, 16).scale is not None
    }
    assert scaled == {"e4m3", "e4m3fnuz"}
