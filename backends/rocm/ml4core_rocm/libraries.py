"""The libraries that the backend stands on: which are here, and what is wrong with the others."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, MutableMapping

from ml4core.api import Refusal
from ml4core_triton import libraries

_OPTIONAL = {"aiter": "amd-aiter", "flydsl": "flydsl"}
"""Module -> distribution. Each serves some op faster; none has to be there."""


def find_torch() -> tuple[str, tuple[Refusal, ...]]:
    """The version of torch ("" if it can't be used), and what keeps it from the GPUs."""
    return libraries.find_torch("rocm", "hip")


def find_other_gpu() -> str:
    """The name of a GPU that torch reaches and that is none of AMD's; "" if there is none."""
    try:
        torch = importlib.import_module("torch")
        if torch.version.hip is not None or not torch.cuda.is_available():
            return ""
        return str(torch.cuda.get_device_name(0))
    except Exception:  # a driver that torch can't use
        return ""


def hip_version() -> str:
    """The HIP that torch was built for; empty if it wasn't, or can't be used."""
    try:
        return str(importlib.import_module("torch").version.hip or "")
    except Exception:
        return ""


def settle_fusion(environment: MutableMapping[str, str] = os.environ) -> None:
    """States that triton fuses products and sums, unless the environment says otherwise: what it
    does where nothing is stated changes with 3.10, and results with it. Before triton is imported.
    """
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def find_triton() -> tuple[str, tuple[Refusal, ...]]:
    """The version of triton ("" if it can't be used), and why it can't."""
    settle_fusion()
    return libraries.find_triton("rocm", "the triton of the ROCm build of torch")


def find_optional() -> Iterator[str]:
    """Each optional library with its version, or with "no" in front. Imports none."""
    return libraries.find_optional(_OPTIONAL)
