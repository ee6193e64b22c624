"""The backend's own ops: which file serves which contract.

Files are imported when a session opens. What stands in no file is composed by core on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType

from ml4core_triton.ops import load, served

OWN: tuple[str, ...] = served("ml4core_rocm")
"""Names of ``ml4core.api.OPS`` that a kernel of ours serves."""


def load_ops(
    act: str | None = None, expert_act: str | None = None, mla_precision: str = "bf16"
) -> Mapping[str, Callable[..., object]]:
    """Each own op by name. Imports triton; nothing where there is none, as on a fake device of a
    machine without it.

    Args:
        act: the format to which products bring inputs that meet a quantised weight, if any.
        expert_act: the same of routed experts alone.
        mla_precision: in what queries of sparse attention meet keys of an FP8 cache.
    """
    if find_spec("triton") is None:
        return MappingProxyType({})
    found = {name: load(name, "ml4core_rocm") for name in OWN}
    for name, wanted in (("gemm", act), ("moe_experts", expert_act or act)):
        if wanted is not None and name in found:
            found[name] = partial(found[name], act=wanted)
    if mla_precision != "bf16":
        found["sparse_mla"] = partial(found["sparse_mla"], precision=mla_precision)
    return MappingProxyType(found)
