"""JAX programs within torch-xla's graphs.

torch-xla has a call for this, which keys what it has lowered by the function's ``id``: once the
function is gone, another one may have it. It also lowers for the platform that it runs on, and
needs torchax. So a program is lowered here, for the platform that is asked for, and kept by key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class LazyCall:
    """Puts programs into the graph of one platform: ``cpu`` or ``tpu``."""

    def __init__(self, platform: str = "cpu") -> None:
        self._platform = platform
        self._lowered: dict[Hashable, tuple[Callable[..., Any], Any]] = {}

    def __call__(self, program: Callable[..., Any], given: tuple[Any, ...], key: Hashable) -> Any:
        """What ``program`` makes of ``given``, trees of lazy tensors without ``None``, as is its
        result. ``key`` names the program, and all that it is bound to; shapes and dtypes come on
        top.
        """
        tensors, form = pytree.tree_flatten(given)
        shapes = tuple((tuple(one.shape), one.dtype) for one in tensors)
        whole = (key, str(form), shapes)
        if whole not in self._lowered:
            name = str(key[0] if isinstance(key, tuple) else key)
            self._lowered[whole] = self._lower(program, form, tensors, name)
        call, result = self._lowered[whole]
        found = call(tensors)
        return pytree.tree_unflatten(
            list(found if isinstance(found, tuple | list) else [found]), result
        )

    def _lower(
        self, program: Callable[..., Any], form: Any, tensors: list[Tensor], name: str
    ) -> tuple[Callable[..., Any], Any]:
        # torch-xla has to take the device before JAX is imported.
        import torch_xla
        import torch_xla.core.xla_builder as builder

        torch_xla._XLAC._init_computation_client()
        import jax

        results: list[Any] = []

        def flat(*arrays: Any) -> tuple[Any, ...]:
            found = program(*pytree.tree_unflatten(list(arrays), form))
            parts, tree = pytree.tree_flatten(found)
            results.append(tree)
            return tuple(parts)

        arguments = [jax.ShapeDtypeStruct(one.shape, _dtype(one.dtype)) for one in tensors]
        traced = jax.jit(flat, keep_unused=True).trace(*arguments)
        module = traced.lower(lowering_platforms=(self._platform,)).compiler_ir("hlo")
        computation = builder.computation_from_module_proto(
            name, module.as_serialized_hlo_module_proto()
        )
        return builder.xla_computation_as_func(computation), results[-1]


def _dtype(dtype: torch.dtype) -> Any:
    import jax.numpy as jnp

    names = {torch.bool: "bool_"}
    return jnp.dtype(names.get(dtype, str(dtype).removeprefix("torch.")))
