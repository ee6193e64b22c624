"""A stand-in for AITER that records its calls: signatures of a release, the library's own rules for
arguments, and results by the suite's oracle. A wrong order of arguments or bytes gives wrong
numbers, or a ``Misuse``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from . import attention, experts, products, selection
from .rules import Misuse, need
from .signatures import RELEASES, signatures

__all__ = ["RELEASES", "Call", "Fake", "Misuse", "install"]

_BODIES: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    name: getattr(module, name)
    for module, names in (
        (attention, ("mla_decode_fwd", "get_mla_metadata_info_v1", "get_mla_metadata_v1")),
        (selection, ("fp8_mqa_logits", "deepgemm_fp8_paged_mqa_logits")),
        (selection, ("top_k_per_row_prefill", "top_k_per_row_decode")),
        (experts, ("fused_moe",)),
        (products, ("gemm_a8w8_blockscale", "rmsnorm2d_fwd", "rmsnorm2d_fwd_with_add")),
        (products, ("gemm_a16w16", "silu_and_mul", "concat_and_cache_mla")),
    )
    for name in names
}


@dataclass(frozen=True)
class Call:
    name: str
    given: dict[str, Any]


@dataclass
class Fake:
    """What is installed, and what it was asked."""

    release: str
    arch: str
    calls: list[Call] = field(default_factory=list)

    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    def last(self, name: str) -> dict[str, Any]:
        return next(call.given for call in reversed(self.calls) if call.name == name)


def install(patch: pytest.MonkeyPatch, release: str = "0.1.21", arch: str = "gfx950") -> Fake:
    """Puts the modules in place until the patch is undone."""
    fake = Fake(release, arch)
    modules: dict[str, ModuleType] = {}
    for full, signature in signatures(release).items():
        path, _, name = full.rpartition(".")
        parts = path.split(".")
        for i in range(len(parts)):
            package = ".".join(parts[: i + 1])
            if package not in modules:
                module = ModuleType(package)
                module.__spec__ = ModuleSpec(package, None)
                module.__path__ = []
                modules[package] = module
                if i:
                    setattr(modules[".".join(parts[:i])], parts[i], module)
        setattr(modules[path], name, _function(fake, name, signature))
    groups = ModuleType("aiter.dist.device_communicators.custom_all_reduce")
    groups.CustomAllreduce = partial(_AllReduce, fake)  # type: ignore[attr-defined]
    modules[groups.__name__] = groups
    modules["aiter"].ActivationType = experts.ActivationType  # type: ignore[attr-defined]
    modules["aiter"].QuantType = experts.QuantType  # type: ignore[attr-defined]
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    patch.setattr("ml4core_rocm.aiter_functions.version", lambda _: release)
    return fake


class _AllReduce:
    """Of two ranks, both of which hold the same."""

    def __init__(self, fake: Fake, group: Any, device: Any, max_size: int) -> None:
        self._fake = fake
        need(isinstance(device, torch.device), f"a device that is a {type(device).__name__}")
        fake.calls.append(Call("CustomAllreduce", {"group": group, "max_size": max_size}))

    def custom_all_reduce(self, input: torch.Tensor) -> torch.Tensor:
        size = input.numel() * input.element_size()
        need(size > 0 and size % 16 == 0, f"{size} bytes")
        order = sorted(range(input.dim()), key=input.stride, reverse=True)
        need(input.permute(order).is_contiguous(), f"strides {input.stride()}")
        self._fake.calls.append(Call("custom_all_reduce", {"input": input}))
        return 2 * input

    def close(self) -> None:
        self._fake.calls.append(Call("close", {}))


def _function(fake: Fake, name: str, signature: inspect.Signature) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        fake.calls.append(Call(name, dict(bound.arguments)))
        return _BODIES[name](fake.arch, dict(bound.arguments))

    call.__name__ = name
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
