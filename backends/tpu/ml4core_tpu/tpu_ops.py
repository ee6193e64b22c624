"""Kernels of the torch ops for torch-tpu's device: the JAX programs that torch-xla gets, too, each
as an op of torch-tpu's own by its ``jax_op``.

That exports a program for TPUs once for each set of shapes, tells tracers what comes out, and calls
it. It takes functions whose tensors are parameters of their own; what a program is bound to is part
of its op's name. Caches are written anew and copied into place, as lazy tensors are: nothing is
donated, since views of a cache are handed over.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch.utils import _pytree as pytree

from ml4core.api import Refusal, Refused
from ml4core_tpu.runtimes import TORCH_TPU, WORKS
from ml4core_tpu.xla_ops import register

DEVICE = "privateuseone"
"""As torch calls it; torch-tpu names it ``tpu`` where it finds one."""
NAMESPACE = "ml4tpu_jax"

JaxOp = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""torch-tpu's: a name ``namespace::name``, and a function of JAX whose parameters say what they
are. Gives an op of torch.
"""


class OpCall:
    """Has ``jax_op`` make an op of each program, when it is first called."""

    def __init__(self, jax_op: JaxOp) -> None:
        self._jax_op = jax_op
        self._ops: dict[Hashable, tuple[Callable[..., Any], list[Any]]] = {}

    def __call__(self, program: Callable[..., Any], given: tuple[Any, ...], key: Hashable) -> Any:
        """What ``program`` makes of ``given``, trees of tensors without ``None``, as is its result.
        ``key`` names the program, and all that it is bound to.
        """
        tensors, form = pytree.tree_flatten(given)
        whole = (key, str(form))
        if whole not in self._ops:
            self._ops[whole] = self._defined(program, form, len(tensors), whole)
        op, trees = self._ops[whole]
        found = op(*tensors)
        return pytree.tree_unflatten(list(found), trees[-1])

    def _defined(
        self, program: Callable[..., Any], form: Any, count: int, whole: tuple[Hashable, str]
    ) -> tuple[Callable[..., Any], list[Any]]:
        """The op, and the forms of its results, which tracing tells."""
        import jax

        trees: list[Any] = []

        def flat(*arrays: jax.Array) -> list[jax.Array]:
            found = program(*pytree.tree_unflatten(list(arrays), form))
            parts, tree = pytree.tree_flatten(found)
            trees.append(tree)
            return parts

        one = inspect.Parameter.POSITIONAL_OR_KEYWORD
        flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(f"x{i}", one, annotation=jax.Array) for i in range(count)],
            return_annotation=list[jax.Array],
        )
        return self._jax_op(f"{NAMESPACE}::{_name(whole)}", flat), trees


def _name(whole: tuple[Hashable, str]) -> str:
    """Of a program: the same in every process, so that what is compiled can be shared."""
    key = whole[0]
    digest = hashlib.blake2b(repr(whole).encode(), digest_size=6).hexdigest()
    return f"{key[0] if isinstance(key, tuple) else key}_{digest}"


@cache
def registered() -> None:
    """Registers a kernel for TPUs with every op, once a process. Raises ``Refused`` where torch-tpu
    is not installed.
    """
    if find_spec(TORCH_TPU) is None:
        subject, reason = f"tpu.runtime={TORCH_TPU}", f"{TORCH_TPU} is not installed"
        raise Refused([Refusal("tpu", subject, reason, WORKS[TORCH_TPU])])
    importlib.import_module(TORCH_TPU)  # without which torch has no module ``tpu``
    register(OpCall(importlib.import_module("torch.tpu.pallas").jax_op), "tpu", DEVICE)
