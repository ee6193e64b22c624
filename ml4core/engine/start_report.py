"""The start-up report of an engine: what runs where, and who serves each part."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ml4core import registry
from ml4core.api import DRAFT_GROUP, Deployment, DraftSpec, Segment, StepShape
from ml4core.engine import switches
from ml4core.engine.kv_pool import Pools
from ml4core.engine.runner import ModelRunner
from ml4core.engine.speculative_config import KEYS, SpeculativeConfig


def start_report(
    choice: registry.Choice,
    deployment: Deployment,
    runner: ModelRunner,
    plan: Pools,
    drafts: SpeculativeConfig | None,
) -> dict[str, Any]:
    """What runs where, who serves each part, and why not others, as JSON-able data."""
    width = -(-deployment.max_model_len // deployment.block_size)
    parts = []
    pages, none = tuple((g, width) for g in plan.layouts), Segment(0, 0, 0)
    shapes = {
        "decode": StepShape(Segment(1, 1, 1), none, none, pages, 1),
        "prefill": StepShape(none, none, Segment(1, 512, 512), pages, 1),
    }
    if drafts is not None:
        window = Segment(1, drafts.window, drafts.window)
        del shapes["decode"]
        shapes["verify"] = StepShape(none, window, none, pages, drafts.window)
    for name, shape in shapes.items():
        parts += [asdict(c) for c in runner.choices(shape) if c.step_kind in (name, "*")]
    if drafts is not None and (draft := deployment.model.draft) is not None:
        block = Segment(1, draft.depth, draft.depth)
        table = ((DRAFT_GROUP, width),)
        drafting = StepShape(none, block, Segment(1, *2 * (drafts.window,)), table, draft.depth)
        stages = (("verify_and_sample", shapes["verify"]), ("draft_block", drafting))
        parts += [asdict(runner.stage(*stage)[1]) for stage in stages]
    ops_seen: set[str] = set()
    unique = []
    for part in parts:
        if part["step_kind"] == "*":
            if part["part"] in ops_seen:
                continue
            ops_seen.add(part["part"])
        unique.append(part)
    record = choice.plugin.record
    return {
        "backend": {
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
        },
        "device": asdict(deployment.device),
        "passed_over": [
            {"name": name, "reasons": [str(r) for r in refusals]} for name, refusals in choice.trace
        ],
        "model": deployment.model.name,
        "dtype": deployment.dtype,
        "weights": {
            "formats": sorted(deployment.weight_formats),
            "bytes": deployment.weight_bytes,
        },
        "switches": switches.told(deployment.additional_config, runner.session),
        "kv": {
            "layouts": {group: layout.id for group, layout in plan.layouts.items()},
            "owners": {group: len(layers) for group, layers in plan.owners.items()},
            "row_bytes": {group: one.bytes_per_token for group, one in plan.layouts.items()},
            "bytes_per_token": plan.bytes_per_token,
            "block_size": plan.block_size,
            "tokens": plan.tokens,
            "bytes": plan.nbytes,
        },
        "max_model_len": deployment.max_model_len,
        "speculation": _told_drafts(drafts, deployment.model.draft),
        "assumptions": dict(deployment.model.assumptions),
        "parts": unique,
    }


def _told_drafts(
    drafts: SpeculativeConfig | None, draft: DraftSpec | None
) -> dict[str, Any] | None:
    if drafts is None or draft is None:
        return None
    facts = {key: getattr(drafts, key) for key in KEYS}
    return facts | {
        "drafter": {
            "layers": len(draft.layers),
            "depth": draft.depth,
            "taps": list(draft.taps),
            "window": draft.window,
            "assumptions": dict(draft.assumptions),
        }
    }
