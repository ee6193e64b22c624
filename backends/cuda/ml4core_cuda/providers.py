"""Libraries that could serve a stage in place of our kernels, and why they don't."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from ml4core.api import Deployment, LayerSpec, Refusal
from ml4core_cuda.rules import Rule

Reasons = Callable[[LayerSpec, Deployment], Iterator[Refusal]]


@dataclass(frozen=True)
class Peer:
    """A library's kernel for one stage.

    Attributes:
        module, distribution: how it is imported and installed.
        against: reasons that lie in a layer or a deployment.
    """

    name: str
    stage: str
    module: str
    distribution: str
    against: Reasons

    def reasons(self, layer: LayerSpec, deployment: Deployment, rule: Rule) -> tuple[Refusal, ...]:
        """Everything against it; nothing, if the rule wants it and it can serve."""
        found = list(self.against(layer, deployment))
        if find_spec(self.module) is None:
            reason = f"the library {self.module} is not installed"
            found.append(Refusal("cuda", self.name, reason, f"pip install {self.distribution}"))
        if rule.provider != self.name:
            reason = f"by rule {rule.provider} serves this from {rule.rows} rows on: "
            found.append(Refusal("cuda", self.name, reason + rule.measured))
        return tuple(found)

    @property
    def version(self) -> str:
        try:
            return version(self.distribution)
        except PackageNotFoundError:
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


PEERS: tuple[Peer, ...] = (
    Peer("FlashMLA", "sparse_mla", "flash_mla", "flash-mla", _flash_mla),
    Peer("FlashInfer", "select", "flashinfer", "flashinfer-python", _flashinfer),
    Peer("DeepGEMM", "select", "deep_gemm", "deep-gemm", _deep_gemm),
)
