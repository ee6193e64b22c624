"""Whether a model could be served, told without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ml4core.engine import switches
from ml4core.engine.args import EngineArgs
from ml4core.serving.opening import open_tokenizer


def dry_run(args: EngineArgs) -> dict[str, Any]:
    """The backend that would run it, and a plan of its memory, JSON-able; None in the plan's place
    with a private cache layout, of which an opened session alone knows the bytes.

    Raises what opening an engine would raise before it reads weights: of a published model that
    isn't here, and of a backend whose device isn't, too.
    """
    from ml4core.planning.launch import has_private_layout, judge

    args = switches.with_environment(args)
    launch = judge(args)
    launch.check()
    choice = launch.choice
    assert choice is not None  # else there is a reason
    from ml4core.models.checkpoint import Checkpoint
    from ml4core.planning.model import checkpoint_model
    from ml4core.planning.plan import PlanOptions, make_plan
    from ml4core.planning.proposals import propose
    from ml4core.planning.report import to_json

    opened, tokenizer, _ = open_tokenizer(args)
    checkpoint = Checkpoint.open(Path(opened.model), require_tensors=False)
    options = PlanOptions(fp8=choice.capabilities.defaults.get("fp8", PlanOptions.fp8))
    plan = None
    if not has_private_layout(args, choice.capabilities):
        made = make_plan(checkpoint_model(checkpoint, None), opened, options)
        plan = to_json(made, propose(made), ())
    record = choice.plugin.record
    return {
        "model": args.model,
        "backend": {
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
        },
        "passed_over": [
            {"name": name, "reasons": [str(refusal) for refusal in refusals]}
            for name, refusals in choice.trace
        ],
        "tokenizer": {"file": str(tokenizer.path), "version": tokenizer.version},
        "plan": plan,
    }
