"""Every case that is compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator

from ml4core_cuda import aot_cases, aot_layer_cases, aot_product_cases
from ml4core_triton import aot_cases as shared_cases
from ml4core_triton.aot import Case


def all_cases() -> Iterator[Case]:
    """Imports triton."""
    yield from aot_cases.cases()
    yield from aot_product_cases.cases()
    yield from shared_cases.cases("ml4core_cuda")
    yield from aot_layer_cases.cases()
