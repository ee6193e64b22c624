"""A device that works behind the host's back, in torch on the host: calls are queued, and results
hold junk until the queue has come to them. It also captures and replays what is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ml4core.engine.transfers import HostCopy

Work = Callable[[], object]
_READS = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select")


class Stream(TorchDispatchMode):
    """Tensors of calls made within this mode are the device's, but for those that ``HostCopy``
    brought to the host and what is made of them.

    Attributes:
        waits: calls that the host had to wait for.
        most: the longest that the queue was.
        hasty: storages, by address, that are written at once and not in their turn: what a host
            does that writes into memory which the device still reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.most = 0
        self.hasty: set[int] = set()
        self._queue: list[tuple[Work, frozenset[int]]] = []
        self._done = 0
        self._recording: list[tuple[Work, frozenset[int]]] | None = None
        self._running = False
        self._host: set[int] = set()
        self._constant: set[int] = set()
        self._alive: list[Any] = []  # so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._running:
            return func(*args, **kwargs)
        given = _storages((args, kwargs))
        self._alive += tree_leaves((args, kwargs))
        if self._recording is None and given <= self._host | self._constant:
            found = self._now(func, args, kwargs)
            kind = self._host if given & self._host else self._constant
            kind |= _storages(found) - self._host
            self._alive += tree_leaves(found)
            return found
        if func._opname in _READS:
            self.waits.append(func._opname)
            self.run()
            return self._now(func, args, kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        found = self._now(func, args, kwargs)
        self._alive += tree_leaves(found)
        if _storages(found) & given:
            return found  # a view
        outs = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        self._spoil(outs)

        def work() -> None:
            again = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
            for out, one in zip(outs, again, strict=True):
                out.copy_(one)

        self._put(work, _storages(found))
        return found

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        written = [
            named[one.name]
            for one in func._schema.arguments
            if one.alias_info is not None and one.alias_info.is_write and one.name in named
        ]
        targets = _storages(written)
        self._constant -= targets
        if targets & self.hasty:
            self._now(func, args, kwargs)
        else:
            self._put(lambda: func(*args, **kwargs), targets)
        return written[0] if func._schema.returns else None

    def _put(self, work: Work, targets: frozenset[int] | set[int]) -> None:
        queue = self._queue if self._recording is None else self._recording
        queue.append((work, frozenset(targets)))
        self.most = max(self.most, len(self._queue))

    def _now(self, func: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        self._running = True
        try:
            with torch.inference_mode():
                return func(*args, **(kwargs or {}))
        finally:
            self._running = False

    def _spoil(self, tensors: Sequence[Tensor]) -> None:
        def spoil() -> None:
            for one in tensors:
                one.fill_(float("nan") if one.is_floating_point() else 0)

        self._now(spoil)

    @property
    def queued(self) -> int:
        """The place behind what was queued so far."""
        return self._done + len(self._queue)

    def run(self, until: int | None = None) -> None:
        """What is queued, all of it or up to a place."""
        while self._queue and (until is None or self._done < until):
            work, _ = self._queue.pop(0)
            self._done += 1
            self._now(work)

    # As ``Graphs`` of an executor.
    def begin(self) -> None:
        self._recording = []

    def end(self) -> Callable[[], None]:
        assert self._recording is not None
        recorded, self._recording = self._recording, None
        return lambda: [self._put(*one) for one in recorded] and None

    def suspended(self, call: Callable[[], object]) -> None:
        call()

    def weak(self, tensor: Tensor) -> Tensor:
        return tensor

    def allocated(self) -> int:
        return 0

    def drop(self) -> None:
        pass

    def copies(self) -> type[HostCopy]:
        """A ``HostCopy`` that is waited for as an event is: what is queued behind it stays."""
        stream = self

        class Copy(HostCopy):
            def __init__(self, tensors: Sequence[Tensor]) -> None:
                super().__init__(tensors)
                self._place = stream.queued

            def wait(self) -> list[Tensor]:
                stream.run(self._place)
                found = super().wait()
                stream._host |= _storages(found)
                return found

        return Copy


def _storages(values: Any) -> set[int]:
    return {
        one.untyped_storage().data_ptr()
        for one in tree_leaves(values)
        if isinstance(one, Tensor) and one.numel()
    }
