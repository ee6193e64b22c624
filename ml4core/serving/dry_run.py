"""Whether a model could be served, told without its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ml4core.engine import switches
from ml4core.engine.args import EngineArgs
from ml4core.engine.image_limits import image_limit
from ml4core.serving.opening import cache_wishes, check_images, open_tokenizer


def dry_run(
    args: EngineArgs, refused: Callable[[dict[str, Any]], None] = lambda told: None
) -> dict[str, Any]:
    """The backend that would run it, a plan of its memory, and sizes that steps are compiled for,
    JSON-able; None in the plan's place with a private cache layout whose bytes an opened session
    alone knows, and in that of the sizes where the backend tells none.

    Raises what opening an engine would raise before it reads weights: of a published model that
    isn't here, and of a backend whose device isn't, too. ``refused`` is told before of what is
    refused: each reason, and the plan, if there can be one.
    """
    from ml4core.planning.launch import judge, knows_layouts

    args = switches.with_environment(args)
    from ml4core.engine.cache_sizes import Wanted, plan_caches
    from ml4core.models.checkpoint import Checkpoint
    from ml4core.planning.model import checkpoint_model
    from ml4core.planning.plan import Plan, make_plan
    from ml4core.planning.proposals import propose
    from ml4core.planning.report import to_json

    def told(plan: Plan | None) -> dict[str, Any] | None:
        return None if plan is None else to_json(plan, propose(plan), ())

    launch = judge(args)
    if launch.refusals:
        reasons = [asdict(one) for one in launch.refusals]
        facts = {"plan": told(launch.plan), "programs": launch.programs}
        refused({"model": args.model, "refusals": reasons, **facts})
    launch.check()
    choice = launch.choice
    assert choice is not None  # else there is a reason

    opened, tokenizer, spec = open_tokenizer(args)
    if image_limit(args.limit_mm_per_prompt):
        check_images(tokenizer, spec)
    checkpoint = Checkpoint.open(Path(opened.model), require_tensors=False)
    plan = None
    if knows_layouts(args, launch.options):
        if args.kv_cache_memory_bytes or args.num_gpu_blocks_override:
            assert launch.deployment is not None
            wanted = Wanted(*cache_wishes(args, choice.capabilities, spec))
            plan_caches(args, launch.deployment, launch.options.layouts, wanted)
        plan = told(make_plan(checkpoint_model(checkpoint, None), opened, launch.options))
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
        "programs": launch.programs,
    }
