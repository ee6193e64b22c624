"""What torch does while a backend runs: which ops, on which devices, and where the host waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SYNCS = frozenset(
    {
        "aten::_local_scalar_dense",  # .item(), int(x), bool(x)
        "aten::item",  # the same in inference mode
        "aten::is_nonzero",
        "aten::equal",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::repeat_interleave.Tensor",
    }
)
"""Ops of which the host needs the result, or whose shape depends on data."""

_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::")
"""Namespaces of torch's collectives."""


@dataclass(frozen=True)
class Seen:
    """One op that torch was asked for.

    Attributes:
        name: with its overload, e.g. ``aten::add.Tensor``.
        inputs, outputs: (device type, count of values, whether floating) of its tensors.
        masked: whether a tensor of bools was used as an index.
        queued: whether it is a copy to the host that the host needn't wait for: one without
            blocking, into pinned memory.
    """

    name: str
    inputs: tuple[tuple[str, int, bool], ...]
    outputs: tuple[tuple[str, int, bool], ...]
    masked: bool = False
    queued: bool = False

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device, or a shape depends on data."""
        if self.name in SYNCS or self.name.partition(".")[0] in SYNCS or self.masked:
            return True
        if self.name.startswith(("aten::_to_copy", "aten::copy_")):
            to_host = any(device == "cpu" for device, _, _ in self.outputs)
            from_device = any(device != "cpu" for device, _, _ in self.inputs)
            return to_host and from_device and not self.queued
        return False


class Watch(TorchDispatchMode):
    """Notes each op of the block that it is a context of. What a custom op does within is its own
    affair, and is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name() if hasattr(func, "name") else str(func)
        masked = False
        if name.startswith(("aten::index.", "aten::index_put")):
            masked = any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1:2]))
        copies = name.startswith(("aten::_to_copy", "aten::copy_"))
        queued = copies and _queued(result, args, kwargs)
        self.seen.append(Seen(name, _forms((args, kwargs or {})), _forms(result), masked, queued))
        return result

    def collectives(self) -> list[str]:
        """The collectives that were called."""
        return [op.name for op in self.seen if op.name.startswith(_COLLECTIVES)]

    def largest(self) -> int:
        """Values of the largest tensor that an op made."""
        return max((count for op in self.seen for _, count, _ in op.outputs), default=0)


def _queued(result: Any, args: Sequence[Any], named: Mapping[str, Any] | None) -> bool:
    """Whether a copy, ``copy_(to, from, non_blocking)`` or ``_to_copy``, is of the kind that the
    device's queue takes.
    """
    asked = (named or {}).get("non_blocking", args[2] if len(args) > 2 else False)
    on_host = [one for one in _tensors(result) if one.device.type == "cpu"]
    return bool(asked) and all(one.is_pinned() for one in on_host)


def _forms(value: Any) -> tuple[tuple[str, int, bool], ...]:
    return tuple((x.device.type, x.numel(), x.is_floating_point()) for x in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):  # a storage, which ops take too, gives its bytes
        for one in value:
            yield from _tensors(one)


def watched(call: Callable[[], Any]) -> tuple[Any, Watch]:
    """The result of a call, and what it did."""
    with Watch() as watch:
        result = call()
    return result, watch
