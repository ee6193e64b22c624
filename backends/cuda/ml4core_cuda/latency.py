"""Decoding for the least latency: ``--additional-config '{"decode_backend":
"latency_specialized"}'``. Everything that isn't known to work is denied, and all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ml4core.api import Accepted, Candidate, Deployment, LayerSpec, Refusal, Rejected, StepShape
from ml4core_cuda import attn_stage
from ml4core_cuda.ffn_stage import release, wanted_act

PROVIDER = "ml4core-cuda/latency_specialized"
KEY, WORD = "decode_backend", "latency_specialized"
ROWS = (1, 2, 4)
"""Rows of the steps that it serves; others are left to the standard path."""
FORMATS = frozenset({"fp32", "bf16", "fp8_block", "fp8_tensor"})
"""Of weights: those whose rows are products in fp32."""
_SUBJECT = f"--additional-config {KEY}"


def wanted(deployment: Deployment) -> bool:
    """Whether it is asked for, by the switch or as a need."""
    switched = deployment.additional_config.get(KEY) == WORD
    return switched or "feature:latency_decode" in deployment.needs


def refusals(deployment: Deployment) -> tuple[Refusal, ...]:
    """Every reason against it, where it is asked for; nothing where it isn't."""
    return tuple(_against(deployment)) if wanted(deployment) else ()


def _against(deployment: Deployment) -> Iterator[Refusal]:
    def refusal(reason: str, remedy: str = "") -> Refusal:
        return Refusal("cuda", _SUBJECT, reason, remedy)

    for name, size in (
        ("tensor-parallel-size", deployment.tensor_parallel_size),
        ("decode-context-parallel-size", deployment.decode_context_parallel_size),
        ("prefill-context-parallel-size", deployment.prefill_context_parallel_size),
        ("pipeline-parallel-size", deployment.pipeline_parallel_size),
    ):
        if size > 1:
            reason = f"{size} ranks would have to add up between its launches (--{name})"
            yield refusal(reason, f"--{name} 1")
    if deployment.enable_expert_parallel:
        yield refusal("experts are spread over ranks", "without --enable-expert-parallel")
    if deployment.dtype != "bfloat16":
        yield refusal(f"its rows are bfloat16, not {deployment.dtype}", "--dtype bfloat16")
    if act := wanted_act(deployment):
        yield refusal(f"inputs of products are to be quantised to {act}; it takes them as they are")
    if unknown := sorted(deployment.weight_formats - FORMATS):
        known = ", ".join(sorted(FORMATS))
        yield refusal(f"weights are in {', '.join(unknown)}; its products take {known}")
    if deployment.model.layers and not any(map(_suits, deployment.model.layers)):
        yield refusal("no layer of this model has both experts and a selection of keys")
    for layer in deployment.model.layers:
        if _suits(layer):
            yield from (
                refusal(f"{one.reason} (layer kind {layer.kind})", one.remedy)
                for one in attn_stage.against(layer, deployment)
                if "quantised to" not in one.reason
            )


def _suits(layer: LayerSpec) -> bool:
    return layer.moe is not None and layer.topk_source is not None


def layer_candidates(
    layer: LayerSpec, shape: StepShape, deployment: Deployment
) -> Sequence[Candidate]:
    """The whole layer, where it is asked for."""
    if not wanted(deployment):
        return ()
    found = [*_against(deployment)]
    if not _suits(layer):
        reason = "it serves layers with experts that attend to a selection of keys"
        found.append(Refusal("cuda", "stage:decoder_layer", reason))
    if shape.rows not in ROWS or shape.prefill.rows:
        rows = ", ".join(map(str, ROWS))
        what = "with a chunk of a prompt" if shape.prefill.rows else f"of {shape.rows} rows"
        reason = f"it serves steps of {rows} rows without chunks; this is one {what}"
        found.append(Refusal("cuda", "stage:decoder_layer", reason))
    if found:
        return (Rejected(PROVIDER, tuple(found)),)
    from ml4core_cuda.kernels.latency_layer import latency_layer

    return (Accepted(PROVIDER, latency_layer(layer), release()),)
