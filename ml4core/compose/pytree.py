"""Teaches torch's pytrees the data classes of the API: arguments of an exported function.

Tensors are leaves; formats, layouts, sizes and shapes belong to the structure. Registers at import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch.utils import _pytree as pytree

from ml4core.api import KVCache, StepPlan, Weight


def register(cls: type, structure: tuple[str, ...]) -> None:
    """Registers a dataclass whose fields named in ``structure`` are no tensors. Once is enough."""
    if cls in pytree.SUPPORTED_NODES:
        return
    names = tuple(f.name for f in fields(cls) if f.name not in structure)

    def flatten(node: Any) -> tuple[list[Any], Any]:
        children = [getattr(node, name) for name in names]
        # Any mapping may stand in a field, but torch knows plain dicts only.
        plain = [dict(child) if isinstance(child, Mapping) else child for child in children]
        return plain, tuple(getattr(node, name) for name in structure)

    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, context = flatten(node)
        keys = [pytree.GetAttrKey(name) for name in names]
        return list(zip(keys, children, strict=True)), context

    def unflatten(children: Iterable[Any], context: Any) -> Any:
        given = dict(zip(names, children, strict=True))
        return cls(**given, **dict(zip(structure, context, strict=True)))

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


register(Weight, ("format", "shape"))
register(KVCache, ("layout", "block_size"))
register(StepPlan, ("shape",))
