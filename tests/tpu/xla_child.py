"""Run in the side environment: ops on torch-xla's tensors beside their CPU kernels, as JSON. Before
them, the names of all that have a kernel for ``xla``.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch_xla  # noqa: TID253  # this is the environment for it
from op_cases import cases, moved

from ml4core_tpu import xla_ops


def registered() -> list[str]:
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ml4tpu::"))
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return sorted(name.partition("::")[2] for name in names if has_kernel(name, "XLA"))


def flat(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values.cpu().float()]
    if isinstance(values, list | tuple):
        return [one for value in values for one in flat(value)]
    return []


def error(found: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, as a part of the largest number if that is above 1. Infinity where
    one is NaN or infinite, and the other isn't the same.
    """
    same = (found == want) | (found.isnan() & want.isnan())
    apart = (found - want).abs().masked_fill(same, 0.0).nan_to_num(torch.inf, torch.inf)
    finite = want[want.isfinite()].abs()
    return max([0.0, *apart.flatten().tolist()]) / max([1.0, *finite.tolist()])


def main() -> None:
    xla_ops.register()
    print(json.dumps({"registered": registered()}), flush=True)
    device = torch_xla.device()
    for name, (op, arguments) in cases().items():
        lazy = moved(arguments, device)
        found, want = op(*lazy), op(*arguments)
        torch_xla.sync()
        pairs = list(zip(flat(found), flat(want), strict=True))
        worst = max(error(mine, right) for mine, right in pairs)
        same = all(mine.shape == right.shape for mine, right in pairs)
        print(json.dumps({"op": name, "error": worst, "same_shape": same}), flush=True)


if __name__ == "__main__":
    main()
