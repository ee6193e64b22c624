"""Temporaries stay small at real sizes. Shapes alone are computed: no memory is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ml4core.api import KVCache, KVLayout, Weight
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.compose.ops import COMPOSED

LIMIT = 64 << 20


class Largest(TorchDispatchMode):
    """Remembers the bytes of each new tensor, by the operation that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func._schema.returns or not func._schema.returns[0].alias_info:
            for x in pytree.tree_leaves(result):
                if isinstance(x, Tensor):
                    size = x.numel() * x.element_size()
                    self.sizes[str(func)] = max(size, self.sizes.get(str(func), 0))
        return result


def cache(layout: KVLayout, blocks: int = 4096) -> KVCache:
    parts = tuple(
        torch.empty(part.shape(blocks, 64), dtype=getattr(torch, part.dtype))
        for part in layout.parts
    )
    return KVCache(layout, 64, parts)


def paged(requests: int, rows: int, pages: int) -> tuple[Any, ...]:
    table = torch.zeros(requests, pages, dtype=torch.int32)
    start = torch.zeros(requests + 1, dtype=torch.int32)
    return table, start, torch.zeros(requests * rows, dtype=torch.int32), rows


def sparse_mla() -> tuple[Any, ...]:
    slots, lens = torch.zeros(64, 2048).int(), torch.zeros(64).int()
    return torch.empty(64, 64, 576), cache(latent_layout("fp8_ds_mla")), slots, lens, 1.0


def window_mla() -> tuple[Any, ...]:
    return torch.empty(64, 64, 576), cache(latent_layout("bf16")), *paged(2, 32, 512), 1.0, None


def indexer_logits() -> tuple[Any, ...]:
    q, weights = torch.empty(256, 32, 128), torch.empty(256, 32)
    return q, weights, 1.0, cache(index_layout("planar_f32")), *paged(2, 128, 512)


def topk() -> tuple[Any, ...]:
    return torch.empty(1024, 65536), torch.zeros(1024, dtype=torch.int32), 2048


def gemm() -> tuple[Any, ...]:
    data = torch.empty(8192, 6144, dtype=torch.uint8)
    weight = Weight("fp8_block", (8192, 6144), {"data": data, "scale": torch.empty(64, 48)})
    return torch.empty(8, 6144), weight


def sample() -> tuple[Any, ...]:
    counts = torch.zeros(256, dtype=torch.int64)
    return torch.empty(256, 131072), torch.zeros(256), counts, counts


@pytest.mark.parametrize("make", [sparse_mla, window_mla, indexer_logits, topk, gemm, sample])
def test_temporaries_at_real_sizes(make: Callable[[], tuple[Any, ...]]) -> None:
    with FakeTensorMode():
        args = make()
        with Largest() as largest:
            result = COMPOSED[make.__name__](*args)
    results = [x.numel() * x.element_size() for x in pytree.tree_leaves(result)]
    allowed = max(LIMIT, *results)
    too_large = {op: size for op, size in largest.sizes.items() if size > allowed}
    assert largest.sizes
    assert not too_large
