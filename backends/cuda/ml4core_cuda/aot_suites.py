"""Every case that is compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from ml4core_cuda import aot_cases, aot_layer_cases, aot_product_cases
from ml4core_cuda.aot import Case


def all_cases() -> Iterator[Case]:
    """Imports triton."""
    yield from aot_cases.cases()
    yield from aot_product_cases.cases()
    yield from aot_layer_cases.cases()
