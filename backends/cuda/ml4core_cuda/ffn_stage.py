"""Who can serve the ``ffn`` stage here, and why not."""

from __future__ import annotations

from collections.abc import Sequence

from ml4core.api import Accepted, Candidate, Deployment, LayerSpec, Refusal, Rejected, StepShape
from ml4core_triton import libraries

PROVIDER = "ml4core-cuda/ffn"
ACTS = ("fp8_block", "fp8_tensor", "mxfp4")
"""Formats in which a deployment may want the inputs of products with quantised weights."""


def wanted_act(deployment: Deployment) -> str | None:
    """The format of products' inputs that the deployment needs, if any."""
    return next((act for act in ACTS if f"act:{act}" in deployment.needs), None)


def ffn_candidates(
    layer: LayerSpec, shape: StepShape, deployment: Deployment
) -> Sequence[Candidate]:
    """The fused stage, for MoE layers of one rank; the shape is of no matter to it."""
    refusals = []
    if layer.moe is None:
        reason = "a dense block has no routing to fuse; it is composed of products"
        refusals.append(Refusal("cuda", "stage:ffn", reason))
    ranks = deployment.tensor_parallel_size
    if ranks > 1 or deployment.enable_expert_parallel:
        reason = f"experts are spread over {ranks} ranks, whose sums come between experts and norm"
        refusals.append(Refusal("cuda", "stage:ffn", reason, "--tensor-parallel-size 1"))
    if refusals or layer.moe is None:
        return (Rejected(PROVIDER, tuple(refusals)),)
    from ml4core_cuda.kernels.ffn import moe_ffn

    call = moe_ffn(layer.moe, layer.norm_eps, wanted_act(deployment))
    return (Accepted(PROVIDER, call, release()),)


def release() -> str:
    """The version of this distribution; ``checkout`` where it isn't installed."""
    return libraries.release("ml4core-cuda")
