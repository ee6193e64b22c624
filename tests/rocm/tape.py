"""A stand-in for graphs of a device: what ran is kept, and runs again on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
"""What tells a host of a device's values."""


class Tape(TorchDispatchMode):
    """Records torch's operations while it is entered, and calls of ``queued`` functions as one
    each. ``AssertionError`` for an operation that would wait for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._runs: list[Callable[[], None]] = []
        self._within = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if self._within:
            return func(*args, **named)
        assert func._schema.name not in READS, f"{func} waits for the device"
        return self._keep(lambda: func(*args, **named))

    def queued(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A library's function, whose own operations are not the adapter's."""

        def call(*args: Any, **named: Any) -> Any:
            def run() -> Any:
                self._within = True
                try:
                    return function(*args, **named)
                finally:
                    self._within = False

            return self._keep(run)

        return call

    def _keep(self, run: Callable[[], Any]) -> Any:
        """The results of a run; later runs write theirs over them."""
        made = run()

        def again() -> None:
            for held, new in zip(pytree.tree_leaves(made), pytree.tree_leaves(run()), strict=True):
                if isinstance(held, Tensor) and held.data_ptr() != new.data_ptr():
                    held.copy_(new)

        self._runs.append(again)
        return made

    def replay(self) -> None:
        for run in self._runs:
            run()
