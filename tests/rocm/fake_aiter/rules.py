"""What the library asks of arguments, and how a fake says that it isn't so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Misuse(AssertionError):
    """A call that the library would refuse, crash on, or answer with numbers without meaning."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Misuse(what)


def array(
    name: str,
    value: Any,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    *,
    dense: bool = True,
) -> Tensor:
    """``value``, if it is a tensor of this dtype and shape; None stands for any size."""
    need(isinstance(value, Tensor), f"{name} is a {type(value).__name__}")
    need(value.dtype == dtype, f"{name} is {value.dtype}, not {dtype}")
    fits = value.dim() == len(shape) and all(
        want is None or want == size for want, size in zip(shape, value.shape, strict=True)
    )
    need(fits, f"{name} is {list(value.shape)}, not {list(shape)}")
    need(not dense or value.is_contiguous(), f"{name} has strides {value.stride()}")
    return value


def ints(name: str, value: Any, *shape: int | None) -> Tensor:
    return array(name, value, torch.int32, shape)


def floats(name: str, value: Any, *shape: int | None) -> Tensor:
    return array(name, value, torch.float32, shape)
