"""Arrays on devices as torch tensors, so that core can hand them from one part of a step to the
next.

What is asked of one but by this backend's programs is answered on the host, by a copy, with torch's
own function: right for any, and slow. A few that core asks for between layers are answered on the
device; so none of a step waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ml4core_tpu.bridge import bucket, padded
from ml4core_tpu.kernels.resident import between
from ml4core_tpu.kernels.resident.devices import Devices
from ml4core_tpu.torch_ops import LEAST_ROWS, bits_of

aten = torch.ops.aten
Change = Callable[[Tensor], object]


class Memory(NamedTuple):
    """What of torch's storage there is of memory on a device."""

    address: int
    size: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


class DeviceTensor(Tensor):
    """A tensor whose values lie in a JAX array.

    torch sees a tensor of the host, without memory there. Rows of steps have an array that doesn't
    change, of as many rows as the tensor or more; what is behind is padding. Caches and weights
    have all of one, in the shape and with the bits that kernels take: a cache gets another array
    with each write.
    """

    array: jax.Array
    devices: Devices
    is_rows: bool
    _host: Tensor | None

    @staticmethod
    def __new__(
        cls,
        array: jax.Array,
        devices: Devices,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: bool = False,
    ) -> DeviceTensor:
        return _made(cls, shape, dtype)  # type: ignore[no-any-return]

    def __init__(
        self,
        array: jax.Array,
        devices: Devices,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: bool = False,
    ) -> None:
        """``rows``: of a step."""
        self.array = array
        self.devices = devices
        self.is_rows = rows
        self._host = None

    @property
    def local(self) -> jax.Array:
        """This process's part, on the first of its devices."""
        found = self.array.addressable_shards[0].data
        if len(self.array.sharding.device_set) > 1:
            return found
        # Of one device in all it is the array itself: as what ops make, or each had two programs.
        first = self.devices.first
        return jax.make_array_from_single_device_arrays(found.shape, first, [found])

    @property
    def others(self) -> list[jax.Array]:
        """The same part, or other parts, on this process's other devices."""
        return [shard.data for shard in self.array.addressable_shards[1:]]

    def replace(self, local: jax.Array, others: list[jax.Array]) -> None:
        """Takes another array for ``local``, which may have been donated; ``others`` are those from
        before. They stay as they are: what ops write is read by ops alone.
        """
        self.array = jax.make_array_from_single_device_arrays(
            self.array.shape, self.array.sharding, [local, *others]
        )

    def host(self) -> Tensor:
        """The values, as a tensor of the host. Waits for them."""
        if self._host is not None:
            return self._host
        whole = self.array if self.array.is_fully_addressable else self.local
        found = torch.from_dlpack(jax.device_put(whole, self.devices.host)).clone()
        if self.is_rows:
            found = self._host = found[: self.shape[0]] if self.ndim else found
            return found
        return found.view(self.dtype).reshape(self.shape)

    def change(self, change: Change) -> None:
        """Changes the values as ``change`` does those of a tensor of the host."""
        if self.is_rows:
            raise RuntimeError("rows of a step on devices are never written to")
        held = self.host()
        change(held)
        same = self.array.dtype.name == str(held.dtype).removeprefix("torch.")
        self.array = self.devices.copied(held if same else bits_of(held), self.array)

    def untyped_storage(self) -> Any:
        """The array's memory on the first device."""
        return Memory(self.local.unsafe_buffer_pointer(), self.local.nbytes)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.array.sharding})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _answered(func, args, kwargs or {})


class _View(Tensor):
    """What a function of torch's sees of a ``DeviceTensor``. To change it changes that."""

    base: DeviceTensor | _View
    look: Callable[[Tensor], Tensor]

    @staticmethod
    def __new__(
        cls, base: DeviceTensor | _View, like: Tensor, look: Callable[[Tensor], Tensor]
    ) -> _View:
        return _made(cls, tuple(like.shape), like.dtype)  # type: ignore[no-any-return]

    def __init__(
        self, base: DeviceTensor | _View, like: Tensor, look: Callable[[Tensor], Tensor]
    ) -> None:
        self.base = base
        self.look = look

    def host(self) -> Tensor:
        return self.look(self.base.host())

    def change(self, change: Change) -> None:
        self.base.change(lambda held: change(self.look(held)))

    def untyped_storage(self) -> Any:
        return self.base.untyped_storage()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"view {tuple(self.shape)} of {self.base!r}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _answered(func, args, kwargs or {})


def _made(cls: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    # One of inference mode couldn't be looked at outside of it.
    with torch.inference_mode(False):
        host = torch.device("cpu")
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=host)


def host_of(tensor: Tensor) -> Tensor:
    """The tensor on the host, which it may be already."""
    return tensor.host() if isinstance(tensor, DeviceTensor | _View) else tensor


def rows_tensor(array: jax.Array, devices: Devices, rows: int) -> DeviceTensor:
    """Rows [rows, ...] of a step, of an array of each data rank's."""
    shape = (rows, *array.shape[1:])
    return DeviceTensor(array, devices, shape, _dtype(array), rows=True)


def _answered(func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """What torch's ``func`` makes of arguments of which one is on devices."""
    on_device = _ON_DEVICE.get(func)
    if on_device is not None and (found := on_device(*args, **given)) is not None:
        return found
    first, rest = (args[0], args[1:]) if args else (None, ())
    if isinstance(first, DeviceTensor | _View):
        how = func._schema.arguments[0].alias_info
        if how is not None and how.is_write:
            first.change(lambda held: func(held, *_hosts(rest), **_hosts(given)))
            return first
        moves = func.overloadpacket is aten.to  # to the host, or another dtype: a copy
        if how is not None and not moves and not getattr(first, "is_rows", False):
            return _views(first, func, rest, given)
    return func(*_hosts(args), **_hosts(given))


def _hosts(tree: Any) -> Any:
    return tree_map(lambda one: host_of(one) if isinstance(one, Tensor) else one, tree)


def _views(first: DeviceTensor | _View, func: Any, rest: Any, given: Any) -> Any:
    found = func(torch.empty(first.shape, dtype=first.dtype, device="meta"), *rest, **given)

    def at(held: Tensor, place: int) -> Tensor:
        several: list[Tensor] = func(held, *rest, **given)
        return several[place]

    if isinstance(found, Tensor):
        return _View(first, found, lambda held: func(held, *rest, **given))
    return [_View(first, like, partial(at, place=place)) for place, like in enumerate(found)]


def _dtype(array: jax.Array) -> torch.dtype:
    found: torch.dtype = getattr(torch, array.dtype.name)
    return found


# What core asks for between the layers of a step, on the device. None: not of this kind.


def _index(held: Any, indices: list[Any]) -> Any:
    of_rows = len(indices) == 1 and indices[0].ndim == 1 and indices[0].dtype == torch.int64
    if not _is_rows(held) or not of_rows:
        return None
    wanted = host_of(indices[0])
    numbers = wanted.numpy()
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < held.shape[0]:
        return None  # JAX would take another row, or one of padding, where torch counts or raises
    many = bucket(len(wanted), LEAST_ROWS)
    found = between.taken(held.local, held.devices.put(padded(wanted, many)))
    return rows_tensor(found, held.devices, len(wanted))


def _both(a: Any, b: Any) -> Any:
    return _logical(between.both, a, b)


def _either(a: Any, b: Any) -> Any:
    return _logical(between.either, a, b)


def _logical(function: Any, a: Any, b: Any) -> Any:
    held = a if isinstance(a, DeviceTensor) else b
    if {one.dtype for one in (a, b)} != {torch.bool} or a.shape != b.shape or not _is_rows(held):
        return None
    rows = held.local.shape[0] if held.ndim else 0

    def array(one: Tensor) -> jax.Array:
        if isinstance(one, DeviceTensor):
            return one.local
        one = host_of(one)
        return held.devices.put(padded(one, rows) if one.ndim else one)

    found = function(array(a), array(b))
    return DeviceTensor(found, held.devices, tuple(held.shape), torch.bool, rows=True)


def _any(held: Any) -> Any:
    if not _is_rows(held) or held.dtype != torch.bool or held.ndim != 1:
        return None
    found = between.any_of(
        held.local, held.devices.put(torch.tensor(held.shape[0], dtype=torch.int32))
    )
    return DeviceTensor(found, held.devices, (), torch.bool, rows=True)


def _cat(tensors: list[Any], dim: int = 0) -> Any:
    first = tensors[0]
    alike = all(_is_rows(one) and one.ndim == 2 for one in tensors)
    if not alike or dim not in (-1, 1) or len({one.local.shape[0] for one in tensors}) > 1:
        return None
    found = between.side_by_side(tuple(one.local for one in tensors))
    return rows_tensor(found, first.devices, first.shape[0])


def _is_rows(tensor: Any) -> bool:
    return isinstance(tensor, DeviceTensor) and tensor.is_rows


_ON_DEVICE: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        aten.index.Tensor: _index,
        aten.bitwise_and.Tensor: _both,
        aten.__and__.Tensor: _both,
        aten.bitwise_or.Tensor: _either,
        aten.__or__.Tensor: _either,
        aten.any.default: _any,
        aten.cat.default: _cat,
    }
)
