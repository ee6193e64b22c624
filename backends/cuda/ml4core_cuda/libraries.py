"""The libraries that the backend stands on: which are here, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Iterator

from ml4core.api import Refusal
from ml4core_triton import libraries

_OPTIONAL = {"flash_mla": "flash-mla", "flashinfer": "flashinfer-python", "deep_gemm": "deep-gemm"}
"""Module -> distribution. Each serves some op faster; none has to be there."""


def find_torch() -> tuple[str, tuple[Refusal, ...]]:
    """The version of torch ("" if it can't be used), and what keeps it from the GPUs."""
    return libraries.find_torch("cuda", "cuda")


def find_triton() -> tuple[str, tuple[Refusal, ...]]:
    """The version of triton ("" if it can't be used), and why it can't."""
    return libraries.find_triton("cuda", "pip install triton, in the version that torch names")


def find_optional() -> Iterator[str]:
    """Each optional library with its version, or with "no" in front. Imports none."""
    return libraries.find_optional(_OPTIONAL)
