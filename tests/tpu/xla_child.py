"""Run in the side environment: ops on torch-xla's tensors beside their CPU kernels, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch_xla  # noqa: TID253  # this is the environment for it

from ml4core_tpu import torch_ops, torch_products, xla_ops
from ml4core_tpu.layouts import lane33_layout, tiles_layout

DRAW = torch.Generator().manual_seed(0)
PAGE = 128


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cases() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    scale = torch.tensor([0.5])
    latents = tiles_layout().pack(normal(3, PAGE, 576), scale)
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
            torch_ops.kv_written,
            [
                *(*(one.clone() for one in latents), scale, torch.tensor([5, -1, 300])),
                *(normal(3, 512), normal(3, 64), "tiles"),
            ],
        ),
        "indexer_written": (
            torch_ops.indexer_written,
            [keys.clone(), torch.tensor([5, -1, 300]), normal(3, 128), "lane33"],
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
                *(experts, 0, False),
            ],
        ),
    }


def moved(value: Any, device: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [moved(one, device) for one in value] if isinstance(value, list) else value


def flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values.cpu().float()]
    if isinstance(values, list | tuple):
        return [one for value in values for one in flat(value)]
    return []


def main() -> None:
    xla_ops.register()
    device = torch_xla.device()
    for name, (op, arguments) in cases().items():
        lazy = moved(arguments, device)
        found, want = op(*lazy), op(*arguments)
        torch_xla.sync()
        both = [flat(found), flat(want)]
        worst = max(
            float((a - b).abs().nan_to_num(0.0).max())
            / max(1.0, float(b[b.isfinite()].abs().max()))
            for a, b in zip(*both, strict=True)
        )
        same = all(a.shape == b.shape for a, b in zip(*both, strict=True))
        print(json.dumps({"op": name, "error": worst, "same_shape": same}), flush=True)


if __name__ == "__main__":
    main()
