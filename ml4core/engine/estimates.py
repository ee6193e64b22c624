"""What the planner would have said of this deployment, beside what was measured."""

from __future__ import annotations

from dataclasses import replace

from ml4core.api import Capabilities, Deployment
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.models.checkpoint import Checkpoint
from ml4core.planning.model import checkpoint_model
from ml4core.planning.plan import CAPTURES, PlanOptions, make_plan

_NOT_A_STEPS = ("graphs", "runtime")


def estimates(
    checkpoint: Checkpoint, args: EngineArgs, deployment: Deployment, capabilities: Capabilities
) -> dict[str, int]:
    """Bytes of a rank by name: ``weights``, ``activations``, ``runtime``, and ``graphs`` where the
    backend captures them. Empty where the planner knows no such layout.
    """
    args = replace(
        args,
        dtype=deployment.dtype,
        block_size=deployment.block_size,
        max_model_len=deployment.max_model_len,
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        enforce_eager=deployment.enforce_eager or CAPTURES not in capabilities,
    )
    try:
        plan = make_plan(checkpoint_model(checkpoint), args, PlanOptions())
    except ArgumentsError:
        return {}
    unloaded = ("vision",) if deployment.model.vision is None else ()
    terms = dict(plan.reserve.terms)
    if unloaded:
        terms.pop("images", None)
    weights = sum(part.rank for name, part in plan.weights.items() if name not in unloaded)
    steps = sum(size for name, size in terms.items() if name not in _NOT_A_STEPS)
    found = {"weights": weights, "activations": steps}
    return found | {name: terms[name] for name in _NOT_A_STEPS if name in terms}
