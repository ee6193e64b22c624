"""A checkpoint's model on the cpu backend, whole or as one of several ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ml4core.api import (
    DRAFT_GROUP,
    Collectives,
    Deployment,
    DraftOutput,
    DraftPlan,
    ModelSpec,
    Sampling,
    StepOutput,
)
from ml4core.cpu.backend import CpuBackend
from ml4core.engine import resolve
from ml4core.engine.runner import ModelRunner
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark import with_drafter
from ml4core.models.dspark_weights import load_draft
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from ml4core.planning import kv
from support.stepping import Sequence, build_plan

BLOCK_SIZE = 16
TOKENS = 96

# Of each kind a layer at least: owners and sharers of an index, an owner and a consumer of a
# latent, dense and MoE. Four ranks have whole blocks of 128, of heads and of widths.
DIMS: dict[str, Any] = {
    "layers": 6,
    "nope_every": 3,
    "hidden": 128,
    "heads": 8,
    "nope_dim": 64,
    "nope_layer_dim": 128,
    "rope_dim": 64,
    "v_dim": 64,
    "kv_lora_rank": 128,
    "topk": 16,
    "experts": 5,
    "experts_per_token": 2,
    "expert_width": 512,
    "dense_width": 512,
    "vocab": 320,
}


@dataclass
class Trace:
    """What a model computed.

    Attributes:
        steps: logits, taps and fault of each step.
        ids: greedy tokens.
        drafts: of each step that drafted.
    """

    steps: list[StepOutput] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    drafts: list[DraftOutput] = field(default_factory=list)


def open_runner(
    folder: Path,
    ranks: Collectives | None = None,
    *,
    dtype: str = "float32",
    expert_parallel: bool = False,
    drafting: bool = False,
) -> ModelRunner:
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    if drafting:
        spec = with_drafter(checkpoint, spec)
    backend = CpuBackend()
    device = backend.probe().devices[0]
    size = 1 if ranks is None else ranks.world_size
    words = ["parallel:tp"] * (size > 1) + ["parallel:ep"] * expert_parallel
    deployment = Deployment(
        model=spec,
        device=device,
        dtype=dtype,
        kv_layout="fp32" if dtype == "float32" else "bf16",
        index_layout="fp32",
        block_size=BLOCK_SIZE,
        tensor_parallel_size=size,
        enable_expert_parallel=expert_parallel,
        needs=frozenset(words),
    )
    session = backend.open(deployment)
    runner = ModelRunner(
        session, "cpu", deployment, backend.capabilities(device), collectives=ranks
    )
    torch_dtype = getattr(torch, dtype)
    runner.load(load_layers(checkpoint, spec, torch_dtype, shard=runner.shard))
    if spec.draft is not None:
        runner.load_draft(load_draft(checkpoint, spec.draft, torch_dtype))
    runner.allocate_kv(_pools(spec, deployment))
    return runner


def _pools(spec: ModelSpec, deployment: Deployment) -> kv.Pools:
    layouts = {"latent": resolve.latent(deployment), "index": resolve.index(deployment)}
    groups = kv.target_groups(spec, layouts)
    if spec.draft is not None:
        groups = (*groups, kv.draft_group(spec.draft))
    return kv.pools_for(groups, BLOCK_SIZE, TOKENS, 2)


def generate(runner: ModelRunner, prompt: list[int], count: int) -> Trace:
    """Greedy tokens after a prompt that is computed in two chunks, beside a request of padding."""
    trace = Trace()
    sequence = Sequence(list(prompt), len(prompt))
    sequence.grow(runner.pools, TOKENS, BLOCK_SIZE)
    first = len(prompt) // 2
    for rows in (first, len(prompt) - first, *(1 for _ in range(count - 1))):
        plan = build_plan([(sequence, rows)], tuple(runner.pools), BLOCK_SIZE, pad_requests=2)
        output = runner.step(plan)
        trace.steps.append(output)
        sequence.computed += rows
        if sequence.computed == len(sequence.token_ids):
            sequence.token_ids.append(int(output.logits[0].argmax()))
            trace.ids.append(sequence.token_ids[-1])
        if runner.draft_kv:
            trace.drafts.append(_draft(runner, sequence, rows, output))
    return trace


def _draft(runner: ModelRunner, sequence: Sequence, rows: int, output: StepOutput) -> DraftOutput:
    """Stores the rows of the step that is done, and drafts behind them."""
    assert runner.spec.draft is not None
    table = torch.tensor([sequence.pages[DRAFT_GROUP]], dtype=torch.int32)

    def slots(positions: Tensor) -> Tensor:
        return table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE

    computed = sequence.computed
    context = torch.arange(computed - rows, computed)
    anchor = sequence.token_ids[computed]
    block = torch.arange(computed, computed + runner.spec.draft.depth)
    plan = DraftPlan(
        context,
        slots(context),
        torch.tensor([anchor]),
        slots(block).unsqueeze(0),
        table,
        Sampling(torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.tensor([computed])),
    )
    return runner.draft(plan, tuple(tap[:rows] for tap in output.taps))
