"""The libraries that the backend stands on: which are here, and what is wrong with the others."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType

from ml4core.api import Refusal
from ml4core_tpu.driver import Chip

INSTALL = 'pip install "ml4core-tpu[jax]"'
"""What brings JAX and the libtpu that it is paired with."""
_OPTIONAL = {"torch_xla": "torch-xla", "torch_tpu": "torch-tpu"}
"""Module -> distribution. Runtimes beside JAX. They are looked up, not imported: with a chip at
hand their import asks the metadata server."""

_SKIP_METADATA = "TPU_SKIP_MDS_QUERY"
_LIBTPU_WITH_7X = (0, 0, 27)
"""The first libtpu that was seen to know tpu7x; 0.0.24 does not."""
_PAIRS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"0.10": ("0.0.42",), "0.11": ("0.0.48", "0.0.50"), "0.12": ("0.0.50", "0.0.52")}
)
"""Release of JAX -> releases of libtpu that it was made with, or was seen to run with. Others
compile plain kernels and may fail elsewhere: JAX 0.10 with libtpu 0.0.50 breaks asynchronous calls.
"""


def find_runtime() -> tuple[str, tuple[Refusal, ...]]:
    """The version of JAX ("" if it can't be used); a reason if no runtime is left."""
    try:
        with _no_metadata_server():
            jax = importlib.import_module("jax")
        return f"jax {jax.__version__}", ()
    except Exception as error:
        others = [found for found in find_optional() if not found.startswith("no ")]
        if others and isinstance(error, ModuleNotFoundError):
            return "", ()
        reason = f"JAX can't be used: {type(error).__name__}: {error}"
        if not others:
            reason += "; there is no torch_xla and no torch_tpu either"
        return "", (Refusal("tpu", "runtime", reason, INSTALL),)


def find_libtpu(chips: tuple[Chip, ...]) -> tuple[str, tuple[Refusal, ...]]:
    """The version of libtpu ("" if there is none), and what is wrong with it for these chips."""
    if find_spec("libtpu") is None:
        return "", (Refusal("tpu", "libtpu", "it is not installed", INSTALL),)
    try:
        found = version("libtpu")
    except PackageNotFoundError:
        return "libtpu of unknown version", ()
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if numbers < _LIBTPU_WITH_7X and any(chip.arch == "tpu7x" for chip in chips):
        first = ".".join(map(str, _LIBTPU_WITH_7X))
        reason = f"libtpu {found} does not know tpu7x"
        return f"libtpu {found}", (Refusal("tpu", "libtpu", reason, f"libtpu {first} or newer"),)
    return f"libtpu {found}", _unpaired(found) if chips else ()


def _unpaired(libtpu: str) -> tuple[Refusal, ...]:
    """Why this libtpu is not for the JAX that is here, if it isn't, or if nobody knows."""
    try:
        jax = version("jax")
    except PackageNotFoundError:
        return ()
    partners = _PAIRS.get(".".join(jax.split(".")[:2]), ())
    if ".".join(libtpu.split(".")[:3]) in partners:
        return ()
    reason = f"libtpu {libtpu} and jax {jax} are not known to go together"
    known = "; ".join(f"jax {one} with libtpu {' or '.join(them)}" for one, them in _PAIRS.items())
    return (Refusal("tpu", "libtpu", reason, known),)


def find_optional() -> Iterator[str]:
    """Each other runtime with its version, or with "no" in front. Imports none."""
    for module, distribution in _OPTIONAL.items():
        if find_spec(module) is None:
            yield f"no {module}"
            continue
        try:
            yield f"{module} {version(distribution)}"
        except PackageNotFoundError:
            yield f"{module} of unknown version"


@contextmanager
def _no_metadata_server() -> Iterator[None]:
    """Outside Google's cloud the server never answers, and its clients wait minutes for it."""
    before = os.environ.get(_SKIP_METADATA)
    os.environ[_SKIP_METADATA] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SKIP_METADATA]
        else:
            os.environ[_SKIP_METADATA] = before
