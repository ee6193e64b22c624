"""torch and triton as a backend finds them: which are here, and what is wrong with the others."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from ml4core.api import Refusal

_RUNTIMES: Mapping[str, str] = {"cuda": "CUDA", "hip": "ROCm"}


def find_torch(backend: str, runtime: Literal["cuda", "hip"]) -> tuple[str, tuple[Refusal, ...]]:
    """The version of torch ("" if it can't be used), and what keeps it from the GPUs of a runtime
    that it is to be built for.
    """
    wanted = _RUNTIMES[runtime]
    remedy = f"a {wanted} build of torch: https://pytorch.org/get-started/locally"
    try:
        torch = importlib.import_module("torch")
        name, built_for = f"torch {torch.__version__}", getattr(torch.version, runtime)
    except Exception as error:
        return "", (Refusal(backend, "torch", _failed(error), remedy),)
    if built_for is None:
        return name, (Refusal(backend, "torch", f"{name} is built without {wanted}", remedy),)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():  # ROCm devices go by that name in torch
            return name, ()
    said = "; ".join(str(warning.message).strip() for warning in caught) or "it gives no reason"
    reason = f"{name}, built for {wanted} {built_for}, reaches no GPU: {said}"
    return name, (Refusal(backend, "torch", reason, "a driver that is new enough for this torch"),)


def find_triton(backend: str, remedy: str) -> tuple[str, tuple[Refusal, ...]]:
    """The version of triton ("" if it can't be used), and why it can't."""
    try:
        triton = importlib.import_module("triton")
        name, _ = f"triton {triton.__version__}", triton.jit  # leftovers import, and hold nothing
    except Exception as error:
        return "", (Refusal(backend, "triton", _failed(error), remedy),)
    return name, ()


def find_optional(known: Mapping[str, str]) -> Iterator[str]:
    """Each optional library, by module and distribution, with its version, or with "no" in front.
    Imports none.
    """
    for module, distribution in known.items():
        if find_spec(module) is None:
            yield f"no {module}"
            continue
        try:
            yield f"{module} {version(distribution)}"
        except PackageNotFoundError:
            yield f"{module} of unknown version"


def release(distribution: str) -> str:
    """Its version; of a checkout that isn't installed there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "checkout"


def _failed(error: Exception) -> str:
    return f"can't be used: {type(error).__name__}: {error}"
