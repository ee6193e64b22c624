"""Candidates for stages: our kernels, and the peers that could stand in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from ml4core.api import Accepted, Candidate, Deployment, LayerSpec, Refusal, Rejected, StepShape
from ml4core_cuda.attn_stage import attn_inputs_candidates, attn_output_candidates
from ml4core_cuda.capabilities import KEYS, LATENTS
from ml4core_cuda.ffn_stage import ffn_candidates, release
from ml4core_cuda.latency import layer_candidates
from ml4core_cuda.providers import PEERS
from ml4core_cuda.rules import OURS, rule_for
from ml4core_cuda.tuned import told

KERNELS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"select": ("indexer_logits", "topk"), "sparse_mla": ("sparse_mla",)}
)
"""Those of a stage whose sizes are measured."""


def candidates(
    stage: str, layer: LayerSpec | None, shape: StepShape, deployment: Deployment
) -> Sequence[Candidate]:
    """Candidates for a stage, best first. Those that can't serve come before those that can, so
    that the start-up report tells their reasons.
    """
    if layer is not None and stage == "ffn":
        return ffn_candidates(layer, shape, deployment)
    if layer is not None and stage == "attn_inputs":
        return attn_inputs_candidates(layer, shape, deployment)
    if layer is not None and stage == "attn_output":
        return attn_output_candidates(layer, shape, deployment)
    if layer is not None and stage == "decoder_layer":
        return layer_candidates(layer, shape, deployment)
    if layer is None or stage not in ("select", "sparse_mla"):
        return ()
    heads = layer.heads if stage == "sparse_mla" else 0
    rule = rule_for(stage, deployment.device.name, shape.rows, heads)
    found: list[Candidate] = [*_sizes_told(stage, deployment)]
    served: list[Candidate] = []
    for peer in PEERS:
        if peer.stage != stage:
            continue
        if reasons := peer.reasons(layer, deployment, rule):
            found.append(Rejected(peer.name, reasons))
        else:
            served.append(Accepted(peer.name, _peer_call(peer.name, layer), peer.version))
    if reasons := _against(stage, layer, deployment):
        found.append(Rejected(OURS, reasons))
    else:
        served.append(Accepted(OURS, _own_call(stage, layer), release()))
    return (*found, *served)


def _sizes_told(stage: str, deployment: Deployment) -> Iterator[Rejected]:
    """What the start-up report is to say of measured sizes that are missing, or not of this
    source.
    """
    if deployment.device.kind != "real":
        return
    reasons = told(deployment.device.name, KERNELS[stage])
    if reasons:
        refusals = tuple(Refusal("cuda", "data/measured.json", one) for one in reasons)
        yield Rejected("measured sizes", refusals)


def _against(stage: str, layer: LayerSpec, deployment: Deployment) -> tuple[Refusal, ...]:
    found = []
    if deployment.kv_layout not in LATENTS:
        reason = f"no kernel reads latents of layout {deployment.kv_layout}"
        found.append(Refusal("cuda", stage, reason, ", ".join(LATENTS)))
    if stage == "select" and deployment.index_layout not in KEYS:
        reason = f"no kernel reads index keys of layout {deployment.index_layout}"
        found.append(Refusal("cuda", stage, reason, ", ".join(KEYS)))
    return tuple(found)


def _own_call(stage: str, layer: LayerSpec) -> Callable[..., object]:
    if stage == "sparse_mla":
        from ml4core_cuda.kernels.attention_stage import sparse_mla_stage

        return sparse_mla_stage(layer)
    from ml4core_cuda.kernels.select_stage import select_stage

    return select_stage(layer, ahead=True)


def _peer_call(name: str, layer: LayerSpec) -> Callable[..., object]:
    if name != "FlashMLA":
        raise KeyError(f"no adapter for {name}")
    from ml4core_cuda.kernels.flash_mla import sparse_mla_stage

    return sparse_mla_stage(layer)
