"""Ops for torch-tpu's device: what its ``jax_op`` is handed, and what it makes of that.

A stand-in that records takes its place, as torch-tpu runs nothing without a TPU. It keeps the rules
of 0.2.0: a name of two parts, parameters that each say that they are arrays, and a program that is
exported for TPUs when a tracer asks for shapes. Unlike torch-tpu it also runs programs, on the
host. Where torch-tpu is installed its own is asked for the shapes of all ops, too.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ml4core.api import Refused
from ml4core_tpu import tpu_ops, xla_ops
from ml4core_tpu.bridge import to_jax, to_torch
from ml4core_tpu.tpu_ops import DEVICE, NAMESPACE, OpCall

CHILD = Path(__file__).parents[1] / "tpu_ops_child.py"
sys.path.insert(0, str(CHILD.parent))

from op_cases import cases  # noqa: E402

KERNELS = {"sparse_mla", "window_mla", "indexer_logits", "topk", "kv_written", "indexer_written",
           "fp8_matmul", "fp8_experts", "fp4_experts, nvfp4", "fp4_experts, mxfp4"}  # fmt: skip
"""Cases with a kernel of Pallas; the others are XLA's alone."""
KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


class JaxOp:
    """The stand-in. ``exported``: modules for TPUs, as text, in the order of their export."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.exported: list[str] = []

    def __call__(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        namespace, short = name.split("::")
        assert namespace == NAMESPACE
        assert short.isidentifier()
        signature = inspect.signature(function, eval_str=True)
        assert all(one.annotation is jax.Array for one in signature.parameters.values())
        assert signature.return_annotation == list[jax.Array]
        self.names.append(name)
        program = jax.jit(function)

        def op(*tensors: torch.Tensor) -> list[torch.Tensor]:
            assert len(tensors) == len(signature.parameters)
            if not isinstance(tensors[0], torch._subclasses.FakeTensor):
                return [to_torch(one) for one in program(*map(to_jax, tensors))]
            shapes = [jax.ShapeDtypeStruct(tuple(x.shape), _name(x.dtype)) for x in tensors]
            found = jax.export.export(program, platforms=["tpu"])(*shapes)
            self.exported.append(str(found.mlir_module()))
            return [tensors[0].new_empty(x.shape, dtype=_dtype(x.dtype)) for x in found.out_avals]

        return op


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(dtype: Any) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def on_tpu(op: Any, arguments: list[Any]) -> Any:
    """What the kernel for TPUs makes of tensors that lie elsewhere."""
    return op._opoverload.redispatch(KEYS, *arguments)


def flat(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


@pytest.fixture(scope="module")
def jax_op() -> JaxOp:
    found = JaxOp()
    xla_ops.register(OpCall(found), "tpu", DEVICE)
    return found


@pytest.mark.parametrize("case", cases())
def test_an_op_is_defined_once_and_exported_for_tpus(jax_op: JaxOp, case: str) -> None:
    op, arguments = cases()[case]
    before, done = len(jax_op.names), len(jax_op.exported)
    with FakeTensorMode() as mode:
        fake = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
        told = op(*fake)
        for _ in range(2):
            found = on_tpu(op, fake)
    shapes = [(one.shape, one.dtype) for one in flat(found)]
    assert shapes == [(one.shape, one.dtype) for one in flat(told)]
    (name,) = jax_op.names[before:]
    assert name == f"{NAMESPACE}::{name.partition('::')[2]}"
    text = jax_op.exported[done]
    assert ("tpu_custom_call" in text) == (case in KERNELS)


def test_programs_get_and_give_what_they_should(jax_op: JaxOp) -> None:
    """By value, with kernels for the host: trees of arguments and of results."""
    xla_ops.register(OpCall(jax_op), "host", DEVICE)
    try:
        for case in ("kv_written", "fp8_matmul"):
            op, arguments = cases()[case]
            found, wanted = flat(on_tpu(op, arguments)), flat(op(*arguments))
            for mine, right in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    finally:
        xla_ops.register(OpCall(jax_op), "tpu", DEVICE)


def test_names_are_those_of_programs_and_of_what_they_are_bound_to() -> None:
    """Not of the process, so that ranks find each other's programs."""
    names = []
    for k in (8, 16, 8):
        recorded = JaxOp()
        call = OpCall(recorded)
        call(lambda x, k=k: x[:k], (torch.zeros(32),), ("first", k))
        names += recorded.names
    assert names[0] == names[2] != names[1]
    assert names[0].startswith(f"{NAMESPACE}::first_")


def test_where_torch_tpu_is_not_installed_that_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tpu_ops, "find_spec", lambda name: None)
    with pytest.raises(Refused, match=r"tpu\.runtime=torch_tpu.*not installed"):
        tpu_ops.registered()


@pytest.mark.skipif(
    find_spec("torch_tpu") is None, reason="there is no torch_tpu: pip install torch-tpu==0.2.0"
)
def test_torch_tpus_own_tells_shapes_of_all_ops() -> None:
    """In a process of its own, since importing it changes torch. Exported for TPUs on the way."""
    done = subprocess.run(
        [sys.executable, str(CHILD)],
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {name: True for name in cases()}
