"""Who can serve the stages ``attn_inputs`` and ``attn_output`` here, and why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ml4core.api import Accepted, Candidate, Deployment, LayerSpec, Refusal, Rejected, StepShape
from ml4core_cuda.capabilities import KEYS, LATENTS
from ml4core_cuda.ffn_stage import release, wanted_act

PROVIDER = "ml4core-cuda/attn_inputs"
OUTPUT_PROVIDER = "ml4core-cuda/attn_output"
MAX_ROWS = 16
"""Rows of a step at most: with more, products apart keep the matrix units busier."""


def attn_inputs_candidates(
    layer: LayerSpec, shape: StepShape, deployment: Deployment
) -> Sequence[Candidate]:
    """The fused stage, for few rows."""
    found = [*against(layer, deployment)]
    if shape.rows > MAX_ROWS:
        reason = f"it is made for {MAX_ROWS} rows at most; this step has {shape.rows}"
        found.append(Refusal("cuda", "stage:attn_inputs", reason))
    if found:
        return (Rejected(PROVIDER, tuple(found)),)
    from ml4core_cuda.kernels.attn_inputs import attn_inputs

    return (Accepted(PROVIDER, attn_inputs(layer, ahead=True), release()),)


def attn_output_candidates(
    layer: LayerSpec, shape: StepShape, deployment: Deployment
) -> Sequence[Candidate]:
    """The stage in launches that follow each other closely, for very few rows of one rank."""
    from ml4core_cuda.kernels.attn_output import MAX_ROWS as MOST
    from ml4core_cuda.kernels.attn_output import attn_output

    def refusal(reason: str, remedy: str = "") -> Refusal:
        return Refusal("cuda", "stage:attn_output", reason, remedy)

    found = []
    if shape.rows > MOST:
        found.append(refusal(f"it is made for {MOST} rows at most; this step has {shape.rows}"))
    if (ranks := deployment.tensor_parallel_size) > 1:
        reason = f"heads are spread over {ranks} ranks, whose sums come before the norm"
        found.append(refusal(reason, "--tensor-parallel-size 1"))
    if act := wanted_act(deployment):
        found.append(
            refusal(f"inputs of products are to be quantised to {act}; it takes them as they are")
        )
    if found:
        return (Rejected(OUTPUT_PROVIDER, tuple(found)),)
    return (Accepted(OUTPUT_PROVIDER, attn_output(layer), release()),)


def against(layer: LayerSpec, deployment: Deployment) -> Iterator[Refusal]:
    """Reasons that lie in the layer or the deployment."""

    def refusal(reason: str, remedy: str = "") -> Refusal:
        return Refusal("cuda", "stage:attn_inputs", reason, remedy)

    if layer.q_lora_rank is not None:
        yield refusal(f"the query has a LoRA of rank {layer.q_lora_rank}, with a norm between")
    spec = layer.indexer
    if spec is not None and spec.hadamard:
        yield refusal("index keys and queries are turned by a Hadamard matrix")
    if act := wanted_act(deployment):
        yield refusal(f"inputs of products are to be quantised to {act}; it takes them as they are")
    if deployment.kv_layout not in LATENTS:
        works = ", ".join(LATENTS)
        yield refusal(f"no kernel writes latents of layout {deployment.kv_layout}", works)
    if spec is not None and deployment.index_layout not in KEYS:
        works = ", ".join(KEYS)
        yield refusal(f"no kernel writes index keys of layout {deployment.index_layout}", works)
