"""The libraries that the backend stands on: which are here, and what is wrong with the others."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ml4core.api import Refusal

_OPTIONAL = {"aiter": "amd-aiter", "flydsl": "flydsl"}
"""Module -> distribution. Each serves some op faster; none has to be there."""


def find_torch() -> tuple[str, tuple[Refusal, ...]]:
    """The version of torch ("" if it can't be used), and what keeps it from the GPUs."""
    remedy = "a ROCm build of torch: https://pytorch.org/get-started/locally"
    try:
        torch = importlib.import_module("torch")
        name, built_for = f"torch {torch.__version__}", torch.version.hip
    except Exception as error:
        return "", (Refusal("rocm", "torch", _failed(error), remedy),)
    if built_for is None:
        return name, (Refusal("rocm", "torch", f"{name} is built without ROCm", remedy),)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():  # ROCm devices go by that name in torch
            return name, ()
    said = "; ".join(str(warning.message).strip() for warning in caught) or "it gives no reason"
    reason = f"{name}, built for ROCm {built_for}, reaches no GPU: {said}"
    return name, (Refusal("rocm", "torch", reason, "a driver that is new enough for this torch"),)


def hip_version() -> str:
    """The HIP that torch was built for; empty if it wasn't, or can't be used."""
    try:
        return str(importlib.import_module("torch").version.hip or "")
    except Exception:
        return ""


def find_triton() -> tuple[str, tuple[Refusal, ...]]:
    """The version of triton ("" if it can't be used), and why it can't."""
    try:
        triton = importlib.import_module("triton")
        name, _ = f"triton {triton.__version__}", triton.jit  # leftovers import, and hold nothing
    except Exception as error:
        remedy = "the triton of the ROCm build of torch"
        return "", (Refusal("rocm", "triton", _failed(error), remedy),)
    return name, ()


def find_optional() -> Iterator[str]:
    """Each optional library with its version, or with "no" in front. Imports none."""
    for module, distribution in _OPTIONAL.items():
        if find_spec(module) is None:
            yield f"no {module}"
            continue
        try:
            yield f"{module} {version(distribution)}"
        except PackageNotFoundError:
            yield f"{module} of unknown version"


def _failed(error: Exception) -> str:
    return f"can't be used: {type(error).__name__}: {error}"
