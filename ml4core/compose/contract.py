"""Holds what a backend's ops return against the table of operations, while their calls are new.

Shapes and dtypes alone are looked at, never data, so a step may be captured or exported meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Arg, KVCache, OpSpec, Weight

_TERM = re.compile(r"(?P<times>\d*)(?P<letter>[A-Za-z]+)(?:(?P<sign>[-+/])(?P<by>\d+))?")
_WEIGHT = re.compile(r"Weight\[(?P<axes>.*)\]")
_LEADING = "..."
_MAX_FORMS = 4096

Sizes = dict[str, Any]
"""Size by letter of the table; under ``...`` the tuple of leading sizes."""


class ContractError(RuntimeError):
    """A backend's op returned something else than the table of operations says."""


class CheckedOp:
    """A backend's op. Its results are checked wherever its arguments are of a form not seen yet.

    Attributes:
        call: the op itself.
    """

    def __init__(self, spec: OpSpec, call: Callable[..., Any], backend: str) -> None:
        self.call = call
        self._spec = spec
        self._backend = backend
        self._seen: set[tuple[object, ...]] = set()

    def __call__(self, *args: Any, **named: Any) -> Any:
        result = self.call(*args, **named)
        if torch.compiler.is_dynamo_compiling():  # it would guard on what is remembered here
            return result
        form = (*map(_form, args), *((name, _form(value)) for name, value in named.items()))
        try:
            if form in self._seen:
                return result
        except TypeError:  # a size that a tracer left open has no hash
            form = ()
        if problem := misfit(self._spec, args, result, named):
            raise ContractError(
                f"backend {self._backend!r}, op {self._spec.name!r}{_origin(self.call)}: {problem}"
            )
        if form:
            if len(self._seen) >= _MAX_FORMS:
                self._seen.clear()
            self._seen.add(form)
        return result


class FirstStep:
    """The ops of one binding: those of a backend are checked in its first step, and no more.

    Attributes:
        ops: by name; the values change.
    """

    def __init__(self, ops: Mapping[str, Callable[..., Any]]) -> None:
        self.ops = dict(ops)
        self._own = {name: op.call for name, op in ops.items() if isinstance(op, CheckedOp)}

    def begins(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, which is the first that a step makes: its second call ends the checks."""
        return _Beginning(call, self) if self._own else call

    def end(self) -> None:
        self.ops.update(self._own)


class _Beginning:
    """A callable, with the attributes that it has."""

    def __init__(self, call: Callable[..., Any], first: FirstStep) -> None:
        self._call = call
        self._first: FirstStep | None = first
        self._begun = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first is not None and not torch.compiler.is_dynamo_compiling():
            if self._begun:
                self._first.end()
                self._first = None
            self._begun = True
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def misfit(
    spec: OpSpec,
    args: Sequence[Any],
    result: object,
    named: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """How a result differs from what the contract says for these arguments; empty if it doesn't."""
    given = dict(zip((arg.name for arg in spec.args), args, strict=False)) | dict(named)
    if not spec.returns:
        wanted = f"wanted is nothing, and {', '.join(spec.writes)} written in place"
        return "" if result is None else f"returned {_shown(result)}; {wanted}"
    results = (result,) if len(spec.returns) == 1 else result
    if not isinstance(results, tuple | list) or len(results) != len(spec.returns):
        names = ", ".join(one.name for one in spec.returns)
        return f"returned {_shown(result)}; wanted are {len(spec.returns)} results: {names}"
    sizes = _sizes(spec, given)
    omitted = any(arg.optional and given.get(arg.name) is None for arg in spec.args)
    for one, found in zip(spec.returns, results, strict=True):
        if found is None and one.optional and omitted:
            continue
        if one.axes is None:  # a weight, of the shape of what it was made from
            fits = isinstance(found, Weight) and found.shape == tuple(given["x"].shape)
            wanted = "" if fits else f"a Weight of shape {list(given['x'].shape)}"
        else:
            wanted = _unlike(one.axes, _dtypes(one, given), found, sizes)
        if wanted:
            return f"result {one.name!r} is {_shown(found)}; wanted is {wanted}"
    return ""


def _unlike(axes: tuple[str, ...], dtypes: Sequence[str], found: object, sizes: Sizes) -> str:
    """What a tensor should be, if it isn't; else ``sizes`` learn from it."""
    due: list[tuple[str, int | None]] = []
    for axis in axes:
        if axis == _LEADING:
            due += [(str(size), size) for size in sizes.get(_LEADING, ())]
        else:
            due.append((axis, _size(axis, sizes)))
    if isinstance(found, Tensor) and _name(found.dtype) in dtypes and found.dim() == len(due):
        # A size that a tracer left open is no int, and to compare it would settle it.
        pairs = zip(due, found.shape, strict=True)
        if all(size in (None, got) or type(got) is not int for (_, size), got in pairs):
            _learn(axes, found.shape, sizes)
            return ""
    values = ", ".join(letter if size is None else str(size) for letter, size in due)
    return f"{' or '.join(dtypes)} [{', '.join(axes)}] = [{values}]"


def _dtypes(one: Arg, given: Mapping[str, Any]) -> Sequence[str]:
    if isinstance(asked := given.get("out_dtype"), torch.dtype):
        return (_name(asked),)
    return one.dtypes


def _sizes(spec: OpSpec, given: Mapping[str, Any]) -> Sizes:
    """What the arguments tell of the letters."""
    sizes: Sizes = {}
    for arg in spec.args:
        value = given.get(arg.name)
        if isinstance(value, Tensor) and arg.axes is not None:
            _learn(arg.axes, value.shape, sizes)
        elif isinstance(value, Weight) and (found := _WEIGHT.fullmatch(arg.dtypes[0])):
            _learn(tuple(found["axes"].split(",")), value.shape, sizes)
        elif isinstance(value, KVCache):
            latent = [field.count for field in value.layout.fields if field.name == "latent"]
            sizes |= {"width": value.layout.width, "block_size": value.block_size}
            sizes |= {"L": latent[0]} if len(latent) == 1 else {}
        elif type(value) is int:
            sizes.setdefault(arg.name, value)
    if "B" in sizes and "block_size" in sizes:
        sizes.setdefault("S", sizes["B"] * sizes["block_size"])
    return sizes


def _learn(axes: Sequence[str], shape: Sequence[int], sizes: Sizes) -> None:
    """Notes the letters of an array of this shape that are not known yet."""
    if _LEADING in axes:
        count = max(0, len(shape) - (len(axes) - 1))
        sizes.setdefault(_LEADING, tuple(shape[:count]))
        axes, shape = [axis for axis in axes if axis != _LEADING], shape[count:]
    if len(axes) != len(shape):
        return
    for axis, size in zip(axes, shape, strict=True):
        if type(size) is int and (term := _TERM.fullmatch(axis)):
            by, sign = int(term["by"] or 0), term["sign"]
            if sign == "/":
                size *= by
            else:
                size -= by if sign == "+" else -by
            sizes.setdefault(term["letter"], size // int(term["times"] or 1))


def _size(axis: str, sizes: Sizes) -> int | None:
    term = _TERM.fullmatch(axis)
    if term is None or term["letter"] not in sizes:
        return None
    size: int = sizes[term["letter"]] * int(term["times"] or 1)
    by = int(term["by"] or 0)
    if term["sign"] == "/":
        return size // by
    return size + by if term["sign"] == "+" else size - by


def _form(value: object) -> object:
    """What of an argument a result's shape or dtype may depend on."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape
    if isinstance(value, Weight):
        return value.shape
    if isinstance(value, KVCache):
        return value.layout.id, value.block_size
    return value if isinstance(value, int | torch.dtype) else value is None


def _origin(call: object) -> str:
    """Where an op comes from, as far as it tells."""
    kind = call if hasattr(call, "__qualname__") else type(call)
    return f" ({getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', '?')})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{_name(value.dtype)} {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
