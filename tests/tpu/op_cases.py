"""Calls of every op that has a kernel for other devices than the host, by op and a form of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ml4core.api import Weight
from ml4core.formats import e2m1
from ml4core_tpu import torch_ops, torch_products, torch_writes
from ml4core_tpu.expert_weights import packed_experts
from ml4core_tpu.layouts import lane33_layout, tiles_layout

DRAW = torch.Generator().manual_seed(0)
PAGE = 128


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fp4(format: str, group: int, rows: int, width: int, halves: int) -> list[torch.Tensor]:
    """Three packed matrices [rows, width]: codes, scales of about 1, and the scales of rows."""
    codes = torch.randint(0, 16, (3, rows, width), generator=DRAW, dtype=torch.uint8)
    near_one = {"nvfp4": 0x38, "mxfp4": 127}[format]
    scale = torch.randint(0, 3, (3, rows, width // group), generator=DRAW, dtype=torch.uint8)
    parts = {"data": e2m1.pack(codes), "scale": near_one + scale}
    if format == "nvfp4":
        parts["global_scale"] = normal(3, rows).abs()
    return [*packed_experts(Weight(format, (3, rows, width), parts), halves).parts.values()]


def fp4_case(format: str, group: int) -> tuple[Callable[..., Any], list[Any]]:
    """Experts 1 and 2, and one that lies on another rank."""
    matrices = fp4(format, group, 256, 128, 2), fp4(format, group, 128, 128, 1)
    choices = normal(2, 2).abs(), torch.tensor([[1, 2], [2, 4]])
    return torch_products.fp4_experts, [normal(2, 128), *matrices, *choices, 1, format]


def fp8_experts_case() -> tuple[Callable[..., Any], list[Any]]:
    """Experts 1 and 2, and one that lies on another rank."""

    def stack(rows: int, width: int) -> list[torch.Tensor]:
        codes = torch.randint(0, 0x7F, (3, rows, width), generator=DRAW, dtype=torch.uint8)
        return [codes, normal(3, rows // 128, width // 128).abs() / 64]

    choices = normal(2, 2).abs(), torch.tensor([[1, 2], [2, 4]])
    given = [normal(2, 128), stack(256, 128), stack(128, 128), *choices, 1, False]
    return torch_products.fp8_experts, given


def cases() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """By op, and a form of it."""
    scale = torch.tensor([0.5])
    latents = tiles_layout().pack(normal(3, PAGE, 576), scale)
    rows = [normal(3, PAGE, 576)]
    (keys,) = lane33_layout().pack(normal(3, PAGE, 128), None)
    slots = ints(*range(5, 45, 2), -1, 3 * PAGE).repeat(2, 1)
    table, starts, visible = ints(1, 2, 2, 1).view(2, 2), ints(0, 1, 2), ints(200, 7)
    codes = torch.randint(0, 0x7F, (256, 256), generator=DRAW, dtype=torch.uint8)
    experts = torch.tensor([[0, 2], [1, 2]])
    return {
        "sparse_mla": (
            torch_ops.sparse_mla,
            [normal(2, 4, 576), list(latents), scale, slots, ints(22, 9), "tiles", 512, 0.05],
        ),
        "sparse_mla, rows": (
            torch_ops.sparse_mla,
            [normal(2, 4, 576), rows, scale, slots, ints(22, 9), "wide", 512, 0.05],
        ),
        "window_mla": (
            torch_ops.window_mla,
            [
                *(normal(2, 4, 576), list(latents), scale, table, starts, visible),
                *("tiles", 512, 64, 1, 0.05, 64),
            ],
        ),
        "gather_kv": (
            torch_ops.gather_kv,
            [list(latents), scale, slots, "tiles", 512, 64],
        ),
        "indexer_logits": (
            torch_ops.indexer_logits,
            [
                *(normal(2, 4, 128), normal(2, 4), keys, table, starts, visible),
                *("lane33", 1, 0.1),
            ],
        ),
        "topk": (torch_ops.topk, [normal(2, 300), ints(300, 9), 16]),
        "kv_written": (
            torch_writes.kv_written,
            [
                *(*(one.clone() for one in latents), scale, torch.tensor([5, -1, 300])),
                *(normal(3, 512), normal(3, 64), "tiles"),
            ],
        ),
        "kv_written, rows": (
            torch_writes.kv_written,
            [
                *(rows[0].clone(), torch.empty(0), scale, torch.tensor([5, -1, 300])),
                *(normal(3, 512), normal(3, 64), "wide"),
            ],
        ),
        "indexer_written": (
            torch_writes.indexer_written,
            [keys.clone(), torch.tensor([5, -1, 300]), normal(3, 128), "lane33"],
        ),
        "indexer_written, rows": (
            torch_writes.indexer_written,
            [normal(3, PAGE, 128), torch.tensor([5, -1, 300]), normal(3, 128), "wide"],
        ),
        "fp8_matmul": (
            torch_products.fp8_matmul,
            [normal(3, 256), codes, normal(2, 2).abs(), torch.float32, False],
        ),
        "wide_matmul": (
            torch_products.wide_matmul,
            [normal(3, 256), normal(128, 256), torch.float32],
        ),
        "router": (torch_products.router, [normal(3, 64), normal(8, 64), 2, True, 1.0]),
        "wide_experts": (
            torch_products.wide_experts,
            [
                *(normal(2, 64), normal(3, 64, 64), normal(3, 64, 32), normal(2, 2).abs()),
                *(experts, 0),
            ],
        ),
        "fp8_experts": fp8_experts_case(),
        "fp4_experts, nvfp4": fp4_case("nvfp4", 16),
        "fp4_experts, mxfp4": fp4_case("mxfp4", 32),
    }


def moved(value: Any, device: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [moved(one, device) for one in value] if isinstance(value, list) else value
