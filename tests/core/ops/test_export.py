"""Each op traces at fixed shapes: no look at the data, same numbers, same bytes in the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ml4core.api import KVCache, SSMaxSpec
from ml4core.api.known_layouts import index_layout, latent_layout
from ml4core.compose.ops import COMPOSED

from .support import Draw, make_cache, poison

Make = Callable[[Draw], tuple[Any, ...]]
"""Arguments from a seed; tensors and caches differ from one seed to the next, all else does not."""


class OneRank:
    rank, world_size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def paged(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """block_table [3, 4], query_start and visible [6] of three requests of 1, 3 and 1 rows."""
    table = draw.permutation(14)[:12].to(torch.int32).view(3, 4)
    start = torch.tensor([0, 1, 4, 5], dtype=torch.int32)
    visible = torch.cat((draw.integers(0, 65, 5), torch.zeros(1, dtype=torch.int64)))
    return table, start, visible.to(torch.int32)


def latent_cache(draw: Draw, id: str, strided: bool = False) -> KVCache:
    layout = latent_layout(id, 128, 16)
    rows = draw.normal(14, 16, layout.width)
    cache = make_cache(layout, rows, strided=strided, scale=0.5 if "e4m3" in id else None)
    poison(cache, [3])
    return cache


def index_cache(draw: Draw, id: str) -> KVCache:
    return make_cache(index_layout(id, 32), draw.normal(14, 16, 32))


def window_args(length: int | None) -> Make:
    def make(draw: Draw) -> tuple[Any, ...]:
        q = draw.normal(6, 2, 144)
        return q, latent_cache(draw, "fp8_ds_mla"), *paged(draw), 3, 0.1, length

    return make


def indexer_args(id: str) -> Make:
    def make(draw: Draw) -> tuple[Any, ...]:
        q, weights = draw.normal(6, 4, 32), draw.normal(6, 4)
        return q, weights, 0.1, index_cache(draw, id), *paged(draw), 3

    return make


def sparse_args(id: str, strided: bool = False) -> Make:
    def make(draw: Draw) -> tuple[Any, ...]:
        slots = draw.integers(-3, 230, 5, 20).to(torch.int32)
        lens = draw.integers(0, 21, 5).to(torch.int32)
        return draw.normal(5, 2, 144), latent_cache(draw, id, strided), slots, lens, 0.1

    return make


def write_args(id: str, strided: bool = False) -> Make:
    def make(draw: Draw) -> tuple[Any, ...]:
        slots = draw.permutation(100)[:5] - 20
        return latent_cache(draw, id, strided), slots, draw.normal(5, 128), draw.normal(5, 16)

    return make


def gemm_args(format: str) -> Make:
    def make(draw: Draw) -> tuple[Any, ...]:
        return draw.normal(3, 160), COMPOSED["quantize"](draw.normal(200, 160), format)

    return make


def expert_args(format: str) -> Make:
    def make(draw: Draw) -> tuple[Any, ...]:
        w13 = COMPOSED["quantize"](draw.normal(5, 64, 64), format)
        w2 = COMPOSED["quantize"](draw.normal(5, 64, 32), format)
        return draw.normal(4, 64), w13, w2, draw.uniform(4, 2), draw.integers(0, 5, 4, 2)

    return make


def verify_args(depth: int, probabilistic: bool) -> Make:
    def make(draw: Draw) -> tuple[Any, ...]:
        logits, drafts = draw.normal(4, depth + 1, 9), draw.integers(-1, 9, 4, depth)
        draft_logits = draw.normal(4, depth, 9) if probabilistic else None
        heat = torch.tensor([0.0, 1.0, 0.5, 2.0])
        return logits, drafts, draft_logits, heat, draw.integers(0, 99, 4), draw.integers(0, 99, 4)

    return make


def topk_args(draw: Draw) -> tuple[Any, ...]:
    return draw.normal(4, 50).round(), draw.integers(0, 60, 4).to(torch.int32), 20


CASES: dict[str, Make] = {
    "embed": lambda d: (d.integers(0, 9, 5), d.normal(9, 8)),
    "rms_norm": lambda d: (d.normal(3, 16), d.normal(16), 1e-6),
    "layer_norm": lambda d: (d.normal(3, 2, 16), d.normal(16), d.normal(16), 1e-6),
    "all_reduce_rms_norm": lambda d: (
        *(d.normal(3, 16) for _ in "xr"),
        d.normal(16),
        1e-6,
        OneRank(),
    ),
    "rope": lambda d: (d.normal(3, 2, 8), d.integers(0, 2**20, 3), d.uniform(4), True, 1.0),
    "rope/halves": lambda d: (d.normal(3, 2, 8), d.integers(0, 2**20, 3), d.uniform(4), False, 1.0),
    **{
        f"ssmax/{kind}": lambda d, kind=kind: (
            d.normal(3, 2, 8),
            d.integers(0, 2**20, 3),
            SSMaxSpec(kind),
            d.uniform(2),
        )
        for kind in ("none", "llama4", "log", "pow", "floor")
    },
    **{
        f"gemm/{f}": gemm_args(f)
        for f in ("fp32", "bf16", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4")
    },
    "head_gemm": lambda d: (d.normal(3, 2, 8), COMPOSED["quantize"](d.normal(2, 4, 8), "fp32")),
    "silu_mul": lambda d: (d.normal(3, 16),),
    **{
        f"kv_write/{id}": write_args(id)
        for id in ("fp8_ds_mla", "e4m3", "e4m3fnuz", "bf16", "fp32")
    },
    "kv_write/strided": write_args("fp8_ds_mla", strided=True),
    **{
        f"indexer_write/{id}": lambda d, id=id: (
            index_cache(d, id),
            d.permutation(100)[:5] - 20,
            d.normal(5, 32),
        )
        for id in ("planar_f32", "planar_ue8m0x4", "tiled16_f32", "fp32")
    },
    "gather_kv": lambda d: (latent_cache(d, "fp8_ds_mla"), d.integers(-1, 224, 2, 5).int()),
    **{
        f"indexer_logits/{id}": indexer_args(id)
        for id in ("planar_f32", "planar_ue8m0x4", "tiled16_f32", "fp32")
    },
    "topk": topk_args,
    "to_slots": lambda d: (
        d.integers(-1, 64, 4, 9).int(),
        d.integers(0, 14, 3, 4).int(),
        d.integers(0, 3, 4),
        16,
    ),
    **{
        f"sparse_mla/{id}": sparse_args(id)
        for id in ("fp8_ds_mla", "e4m3", "e4m3fnuz", "bf16", "fp32")
    },
    "sparse_mla/strided": sparse_args("bf16", strided=True),
    "window_mla": window_args(None),
    "window_mla/pages": window_args(30),
    "window_mla/gathered": window_args(4),
    "merge_lse": lambda d: (d.normal(3, 4, 2, 8), d.normal(3, 4, 2)),
    "router": lambda d: (d.normal(4, 16), d.normal(8, 16), 3, True, 1.0),
    **{f"moe_experts/{f}": expert_args(f) for f in ("fp32", "bf16", "mxfp4")},
    **{
        f"quantize/{f}": lambda d, f=f: (d.normal(3, 4, 64), f)
        for f in ("fp32", "bf16", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4")
    },
    "sample": lambda d: (d.normal(4, 33), d.uniform(4), d.integers(0, 99, 4), d.integers(0, 99, 4)),
    "verify_draft": verify_args(2, False),
    "verify_draft/probabilistic": verify_args(3, True),
    "verify_draft/no drafts": verify_args(0, False),
}


class Call(torch.nn.Module):
    """An op with all that isn't a tensor fixed."""

    def __init__(self, op: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self.op, self.args = op, args
        self.places = [i for i, arg in enumerate(args) if self.varies(arg)]

    @staticmethod
    def varies(arg: object) -> bool:
        return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(arg))

    def forward(self, *given: Any) -> Any:
        args = list(self.args)
        for place, arg in zip(self.places, given, strict=True):
            args[place] = arg
        return self.op(*args)

    def pick(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(args[place] for place in self.places)


def equal(a: Any, b: Any) -> bool:
    left, left_spec = pytree.tree_flatten(a)
    right, right_spec = pytree.tree_flatten(b)
    return left_spec == right_spec and all(
        x is y or torch.equal(x.nan_to_num(7.5), y.nan_to_num(7.5))
        for x, y in zip(left, right, strict=True)
    )


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fresh tensors with the strides of the old."""

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.is_contiguous():
            return x.clone() if isinstance(x, Tensor) else x
        room = torch.empty(1, dtype=x.dtype).set_(x.untyped_storage().clone())
        return room.as_strided(x.shape, x.stride(), x.storage_offset())

    return pytree.tree_map(copy, args)


def test_every_op_is_exported() -> None:
    assert {case.split("/")[0] for case in CASES} == set(COMPOSED)


@pytest.mark.parametrize("case", CASES)
def test_exported_ops_compute_the_same(case: str) -> None:
    op, make = COMPOSED[case.split("/")[0]], CASES[case]
    traced = make(Draw(1))
    call = Call(op, traced)
    program = torch.export.export(call, call.pick(copies(traced)), strict=False)
    compiled = program.module()
    for seed in (1, 2, 3):
        given = call.pick(make(Draw(seed)))
        mine, theirs = copies(given), copies(given)
        want, got = call(*mine), compiled(*theirs)
        assert equal(got, want)
        assert equal(theirs, mine)
        writes = op in (COMPOSED["kv_write"], COMPOSED["indexer_write"])
        assert equal(mine, given) != writes


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_lowered_programs_write_the_cache_too() -> None:
    """Functional form, as compilers take it: the write comes back as a mutated input."""
    make = CASES["kv_write/fp8_ds_mla"]
    call = Call(COMPOSED["kv_write"], make(Draw(1)))
    program = torch.export.export(call, call.pick(make(Draw(1))), strict=False)
    lowered = program.run_decompositions().module()
    given = call.pick(make(Draw(2)))
    mine, theirs = copies(given), copies(given)
    call(*mine)
    lowered(*theirs)
    assert equal(theirs, mine)


def test_a_cache_is_rebuilt_with_its_layout() -> None:
    cache = latent_cache(Draw(1), "e4m3")
    leaves, spec = pytree.tree_flatten(cache)
    assert len(leaves) == 2  # one part and the scale
    again = pytree.tree_unflatten(leaves, spec)
    assert (again.layout, again.block_size) == (cache.layout, cache.block_size)
    assert again.parts[0] is cache.parts[0]
    other = replace(cache, block_size=8)
    assert pytree.tree_structure(other) != spec
