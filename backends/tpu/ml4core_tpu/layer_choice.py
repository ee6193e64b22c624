"""Whether a deployment's layers can be programs."""

from __future__ import annotations

from ml4core.api import Deployment, Refusal
from ml4core_tpu.ops import INDEX_KINDS, LATENT_KINDS
from ml4core_tpu.runtimes import LAZY, runtime_of

PROVIDER = "ml4core-tpu"


def layer_refusals(deployment: Deployment) -> tuple[Refusal, ...]:
    """Why layers run op by op."""
    found = []
    subject = "stage:decoder_layer"
    if deployment.enforce_eager:
        reason = "--enforce-eager: nothing is compiled ahead, each op when it is first called"
        found.append(Refusal("tpu", subject, reason, "no --enforce-eager"))
    if runtime_of(deployment) == LAZY:
        reason = f"tpu.runtime={LAZY}: a step is one graph, of core's layers op by op"
        found.append(Refusal("tpu", subject, reason, "tpu.runtime=jax"))
    for what, layout, kinds in (
        ("latents", deployment.kv_layout, LATENT_KINDS),
        ("index keys", deployment.index_layout, INDEX_KINDS),
    ):
        if layout not in kinds:
            reason = f"no kernel reads {what} of layout {layout}"
            found.append(Refusal("tpu", subject, reason, ", ".join(kinds)))
    return tuple(found)
