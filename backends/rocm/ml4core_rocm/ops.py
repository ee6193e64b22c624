"""The backend's own ops: which file serves which contract.

A kernel's file is named as its op and holds a function of that name. Files are imported when a
session opens. What stands in no file is composed by core on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from ml4core.api import OPS

_KERNELS = Path(__file__).parent / "kernels"

OWN: tuple[str, ...] = tuple(name for name in OPS if (_KERNELS / f"{name}.py").is_file())
"""Names of ``ml4core.api.OPS`` that a kernel of ours serves."""


def load_ops(
    act: str | None = None, expert_act: str | None = None
) -> Mapping[str, Callable[..., object]]:
    """Each own op by name. Imports triton; nothing where there is none, as on a fake device of a
    machine without it.

    Args:
        act: the format to which products bring inputs that meet a quantised weight, if any.
        expert_act: the same of routed experts alone.
    """
    if find_spec("triton") is None:
        return MappingProxyType({})
    found = {name: getattr(import_module(f"ml4core_rocm.kernels.{name}"), name) for name in OWN}
    for name, wanted in (("gemm", act), ("moe_experts", expert_act or act)):
        if wanted is not None and name in found:
            found[name] = partial(found[name], act=wanted)
    return MappingProxyType(found)
