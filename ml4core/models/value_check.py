"""Values of a checkpoint that are no numbers: found while they are read, at more than memory's
speed, as no model works with them.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from ml4core.models.errors import CheckpointError
from ml4core.models.safetensors_file import TensorInfo

_CHUNK = 1 << 21  # values that are looked at together, so that temporaries stay in a cache
# Bits of the dtype's exponent: where all are set, the value is NaN or infinite.
_EXPONENTS = MappingProxyType({torch.bfloat16: 0x7F80, torch.float16: 0x7C00})


class ValuesError(CheckpointError):
    """Values of a checkpoint that aren't finite."""


class ValueCheck:
    """Counts what isn't finite in a tensor's rows. `form` says in what form, if not as it is."""

    def __init__(self, info: TensorInfo, form: str = "") -> None:
        self._info = info
        self._form = form
        self._nan = self._infinite = 0
        self._first: int | None = None

    def add(self, start: int, values: Tensor) -> None:
        """Look at rows from `start` on, of any dtype; only floats can be wrong."""
        if not values.is_floating_point() or _all_finite(values):
            return
        wide = values.to(torch.float32).reshape(values.shape[0] if values.dim() else 1, -1)
        if self._first is None:
            self._first = start + int((~wide.isfinite()).any(-1).nonzero()[0])
        self._nan += int(wide.isnan().sum())
        self._infinite += int(wide.isinf().sum())

    def finish(self) -> None:
        """Raises ValuesError if anything was wrong."""
        if self._first is None:
            return
        counts = {"NaN": self._nan, "infinite": self._infinite}
        found = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        raise ValuesError(
            f"{self._info.file}: {self._info.name}: {found} values{self._form}, the first in row "
            f"{self._first}; all must be finite. Get an intact copy of the checkpoint"
        )


def check_values(info: TensorInfo, values: Tensor, start: int = 0) -> None:
    """Raises ValuesError unless all values of a tensor, or of its rows from `start` on, are
    finite.
    """
    check = ValueCheck(info)
    check.add(start, values)
    check.finish()


def _all_finite(values: Tensor) -> bool:
    flat = values.reshape(-1)
    return all(_finite(chunk) for chunk in flat.split(_CHUNK)) if flat.numel() else True


def _finite(values: Tensor) -> bool:
    if (exponent := _EXPONENTS.get(values.dtype)) is not None:
        return int((values.view(torch.int16) & 0x7FFF).amax()) < exponent
    if values.dtype == torch.float8_e4m3fn:
        return int((values.view(torch.uint8) & 0x7F).amax()) < 0x7F
    wide = values if values.dtype in (torch.float32, torch.float64) else values.to(torch.float32)
    # A sum of what is finite is, unless it overflows: then each is looked at.
    return bool(wide.sum().isfinite()) or bool(wide.isfinite().all())
