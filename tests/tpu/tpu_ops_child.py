"""Run where torch-tpu is installed: whether the shapes that its ``jax_op`` tells, of programs that
it exports for TPUs, are those of each op, as JSON. No TPU is asked for.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from op_cases import cases
from torch._subclasses.fake_tensor import FakeTensorMode

from ml4core_tpu import tpu_ops
from ml4core_tpu.bridge import host_environment

KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


def shapes(value: Any) -> list[tuple[torch.Size, torch.dtype]]:
    every = value if isinstance(value, tuple | list) else (value,)
    return [(one.shape, one.dtype) for one in every]


def main() -> None:
    host_environment()
    tpu_ops.registered()
    found = {}
    for name, (op, arguments) in cases().items():
        with FakeTensorMode() as mode:
            fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
            told = op._opoverload.redispatch(KEYS, *fake)
            found[name] = shapes(told) == shapes(op(*fake))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
