"""Whether a deployment's layers, and its encoder of images, can be programs."""

from __future__ import annotations

from ml4core.api import Deployment, Refusal
from ml4core_tpu.ops import INDEX_KINDS, LATENT_KINDS
from ml4core_tpu.runtimes import LAZY, runtime_of

PROVIDER = "ml4core-tpu"
LAYERS, IMAGES = "stage:decoder_layer", "stage:vision_encoder"


def eager_refusals(deployment: Deployment, subject: str) -> tuple[Refusal, ...]:
    """Why a stage runs op by op, if nothing is compiled."""
    if not deployment.enforce_eager:
        return ()
    how = "nothing is compiled ahead, each op when it is first called"
    if runtime_of(deployment) == LAZY and subject != IMAGES:
        how = "a step is one graph, of core's layers op by op"
    return (Refusal("tpu", subject, f"--enforce-eager: {how}", "no --enforce-eager"),)


def layer_refusals(deployment: Deployment) -> tuple[Refusal, ...]:
    """Why layers run op by op."""
    found = list(eager_refusals(deployment, LAYERS))
    for what, layout, kinds in (
        ("latents", deployment.kv_layout, LATENT_KINDS),
        ("index keys", deployment.index_layout, INDEX_KINDS),
    ):
        if layout not in kinds:
            reason = f"no kernel reads {what} of layout {layout}"
            found.append(Refusal("tpu", LAYERS, reason, ", ".join(kinds)))
    return tuple(found)
