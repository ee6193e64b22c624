"""Whether a model could be served, told without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ml4core.engine import switches
from ml4core.engine.args import EngineArgs
from ml4core.engine.image_limits import image_limit
from ml4core.serving.opening import cache_wishes, check_images, open_tokenizer


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
    from ml4core.engine.cache_sizes import Wanted, plan_caches
    from ml4core.models.checkpoint import Checkpoint
    from ml4core.planning.model import checkpoint_model
    from ml4core.planning.plan import PlanOptions, make_plan
    from ml4core.planning.proposals import propose
    from ml4core.planning.report import to_json

    opened, tokenizer, spec = open_tokenizer(args)
    if image_limit(args.limit_mm_per_prompt):
        check_images(tokenizer, spec)
    checkpoint = Checkpoint.open(Path(opened.model), require_tensors=False)
    plan = None
    if not has_private_layout(args, choice.capabilities):
        if args.kv_cache_memory_bytes or args.num_gpu_blocks_override:
            assert launch.deployment is not None
            wanted = Wanted(*cache_wishes(args, choice.capabilities, spec))
            plan_caches(args, launch.deployment, {}, wanted)
        made = make_plan(
            checkpoint_model(checkpoint, None), opened, PlanOptions(backend=choice.capabilities)
        )
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
