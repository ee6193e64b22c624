"""Libraries that could serve a stage in place of our kernels, and why they don't."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from ml4core.api import Deployment, LayerSpec, Refusal
from ml4core_cuda.rules import Rule

Reasons = Callable[[LayerSpec, Deployment], Iterator[Refusal]]
Unfit = Callable[[Any], str]


@dataclass(frozen=True)
class Peer:
    """A library's kernel for one stage.

    Attributes:
        module, distribution: how it is imported and installed.
        against: reasons that lie in a layer or a deployment.
        unfit: why a release of it can't be called, by its signatures; empty if it can.
    """

    name: str
    stage: str
    module: str
    distribution: str
    against: Reasons
    unfit: Unfit

    def reasons(self, layer: LayerSpec, deployment: Deployment, rule: Rule) -> tuple[Refusal, ...]:
        """Everything against it; nothing, if the rule wants it and it can serve."""
        found = list(self.against(layer, deployment))
        if absent := self.absent():
            found.append(Refusal("cuda", self.name, absent, f"pip install {self.distribution}"))
        if rule.provider != self.name:
            reason = f"by rule {rule.provider} serves this from {rule.rows} rows on: "
            found.append(Refusal("cuda", self.name, reason + rule.measured))
        return tuple(found)

    def absent(self) -> str:
        """Why the library can't be called here; empty if it can."""
        if find_spec(self.module) is None:
            return f"the library {self.module} is not installed"
        try:
            module = import_module(self.module)
        except Exception as error:  # an import of a library may do anything
            return f"{self.module} can't be imported: {type(error).__name__}: {error}"
        told = self.unfit(module)
        return f"{self.module} {self.version or 'of unknown version'}: {told}" if told else ""

    @property
    def version(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return ""


def lacking(module: Any, **wanted: tuple[str, ...]) -> str:
    """What a module lacks of functions with these arguments; empty if nothing. A function that
    doesn't tell its arguments is taken as it is.
    """
    for name, arguments in wanted.items():
        function = getattr(module, name, None)
        if not callable(function):
            return f"it has no {name}"
        try:
            known = inspect.signature(function).parameters
        except (TypeError, ValueError):
            continue
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            continue
        if missing := [one for one in arguments if one not in known]:
            return f"its {name} takes no {', '.join(missing)}"
    return ""


def _flash_mla(layer: LayerSpec, deployment: Deployment) -> Iterator[Refusal]:
    if layer.topk_source is None:
        yield Refusal("cuda", "FlashMLA", "its sparse kernel attends to chosen keys only")
    if deployment.kv_layout != "fp8_ds_mla":
        reason = f"its sparse decoding reads rows of fp8_ds_mla, not of {deployment.kv_layout}"
        yield Refusal("cuda", "FlashMLA", reason, "--kv-cache-dtype fp8_ds_mla")
    if (layer.kv_lora_rank, layer.rope_dim) != (512, 64):
        widths = f"{layer.kv_lora_rank} and {layer.rope_dim}"
        yield Refusal("cuda", "FlashMLA", f"its rows are of 512 and 64 values, not of {widths}")
    if deployment.dtype != "bfloat16":
        reason = f"its queries are bfloat16, not {deployment.dtype}"
        yield Refusal("cuda", "FlashMLA", reason, "--dtype bfloat16")


def _flashinfer(layer: LayerSpec, deployment: Deployment) -> Iterator[Refusal]:
    reason = "which of equal scores its top-k takes is not defined; the lowest position is wanted"
    yield Refusal("cuda", "FlashInfer", reason)


def _deep_gemm(layer: LayerSpec, deployment: Deployment) -> Iterator[Refusal]:
    reason = "its index scores are summed by FP8 instructions, which keep fewer bits than fp32"
    yield Refusal("cuda", "DeepGEMM", reason)


def _flash_mla_unfit(module: Any) -> str:
    decode = ("q", "k_cache", "head_dim_v", "softmax_scale", "is_fp8_kvcache", "indices")
    told = lacking(module, get_mla_metadata=(), flash_mla_with_kvcache=decode)
    has_legacy = getattr(module, "has_legacy", None)
    if not told and callable(has_legacy) and not has_legacy():
        return "it is built without the kernels of sm_90 and of this row layout"
    return told


def _flashinfer_unfit(module: Any) -> str:
    return lacking(module, top_k=("k",))


def deep_gemm_unfit(module: Any) -> str:
    return lacking(module, fp8_gemm_nt=())


PEERS: tuple[Peer, ...] = (
    Peer("FlashMLA", "sparse_mla", "flash_mla", "flash-mla", _flash_mla, _flash_mla_unfit),
    Peer("FlashInfer", "select", "flashinfer", "flashinfer-python", _flashinfer, _flashinfer_unfit),
    Peer("DeepGEMM", "select", "deep_gemm", "deep-gemm", _deep_gemm, deep_gemm_unfit),
)
