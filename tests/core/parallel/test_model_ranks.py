"""Ranks that share a model out compute what one rank with all of it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.api import Collectives, Deployment, FaultError, Weight
from ml4core.cpu.backend import CpuBackend
from ml4core.engine.collectives import SingleRank
from ml4core.engine.runner import ModelRunner
from ml4core.engine.thread_ranks import run_ranks
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.dspark import draft_spec
from ml4core.models.dspark_weights import expected_draft_tensors
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded import make_seeded
from ml4core.models.seeded_config import PRESETS

from .ranks import DIMS, Trace, generate, open_runner

PROMPT = torch.randint(0, 320, (41,), generator=torch.Generator().manual_seed(3)).tolist()
COUNT = 6
FORMATS = ("fp32", "bf16", "fp8_block", "nvfp4_ct", "mxfp4")
SPLITS = [(2, False), (4, False), (2, True), (4, True)]
"""Ranks, and whether experts are whole. Of four ranks the first has two of the five experts, and
the last none of the 320 tokens.
"""

Seeded = Callable[..., Path]


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Seeded:
    made: dict[str, Path] = {}

    def make(format: str) -> Path:
        if format not in made:
            folder = tmp_path_factory.mktemp("parallel") / format
            made[format] = make_seeded(folder, format=format, **DIMS)  # type: ignore[arg-type]
        return made[format]

    return make


def traces(
    folder: Path, size: int, expert_parallel: bool = False, *, count: int = COUNT, **options: Any
) -> list[Trace]:
    def work(ranks: Collectives) -> Trace:
        runner = open_runner(folder, ranks, expert_parallel=expert_parallel, **options)
        return generate(runner, PROMPT, count)

    return run_ranks(size, work)


def same_on_all(found: list[Trace]) -> None:
    """Bit for bit: a rank that is off by a bit may draw, or select, something else."""
    first, *others = found
    for other in others:
        assert other.ids == first.ids
        for mine, theirs in zip(first.steps, other.steps, strict=True):
            assert torch.equal(mine.logits, theirs.logits)
            assert torch.equal(mine.fault, theirs.fault)
            assert all(map(torch.equal, mine.taps, theirs.taps))
        for mine, theirs in zip(first.drafts, other.drafts, strict=True):
            assert torch.equal(mine.logits, theirs.logits)
            assert torch.equal(mine.ids, theirs.ids)


def equal(got: Trace, want: Trace, bound: float = 2e-4) -> None:
    assert got.ids == want.ids
    for mine, theirs in zip(got.steps, want.steps, strict=True):
        assert mine.logits.shape == theirs.logits.shape
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=bound, atol=bound)
    for mine, theirs in zip(got.drafts, want.drafts, strict=True):
        assert torch.equal(mine.ids, theirs.ids)
        # A row of the drafter's cache may be rounded the other way, to bf16.
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("format", FORMATS)
def test_each_format(seeded: Seeded, format: str) -> None:
    folder = seeded(format)
    whole = generate(open_runner(folder), PROMPT, COUNT)
    assert len(set(whole.ids)) > 1
    for size, expert_parallel in SPLITS:
        found = traces(folder, size, expert_parallel)
        same_on_all(found)
        equal(found[0], whole)


def test_bf16(seeded: Seeded) -> None:
    """Each rank rounds its own part: as far from fp32 as one rank is, and the same on all."""
    folder = seeded("bf16")
    exact = generate(open_runner(folder), PROMPT, 1)

    def distance(found: Trace) -> float:
        pairs = zip(found.steps, exact.steps, strict=True)
        return max(float((a.logits - b.logits).norm() / b.logits.norm()) for a, b in pairs)

    whole = distance(generate(open_runner(folder, dtype="bfloat16"), PROMPT, 1))
    for size, expert_parallel in SPLITS:
        found = traces(folder, size, expert_parallel, dtype="bfloat16", count=1)
        same_on_all(found)
        assert distance(found[0]) < 2 * whole


MTP: dict[str, Any] = {
    "target_layers": [1, 3, 5],
    "n_layers": 2,
    "depth": 3,
    "sliding_window": 12,
    "markov_rank": 32,
    "hidden_dim": 192,
}


@pytest.fixture(scope="module")
def drafting(seeded: Seeded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fp32 model with a drafter."""
    opened = Checkpoint.open(seeded("fp32"))
    params = {**json.loads((opened.path / "params.json").read_text()), "mtp": MTP}
    draft = draft_spec(build_model_spec(params))
    generator = torch.Generator().manual_seed(5)
    folder = tmp_path_factory.mktemp("parallel") / "drafting"
    with CheckpointWriter(folder) as writer:
        writer.add_json("params.json", params)
        for name in opened.tensors:
            writer.add(name, opened.read(name))
        for name, entry in expected_draft_tensors(draft, own_frequencies=False).items():
            shape = entry.shapes[0]
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            writer.add(name, 1 + 0.1 * values if entry.kind == "vector" else values)
    return folder


@pytest.mark.parametrize(("size", "expert_parallel"), [(2, False), (4, True)])
def test_drafts(drafting: Path, size: int, expert_parallel: bool) -> None:
    """The drafter is whole on each rank, the embedding and the output that it shares are not."""
    whole = generate(open_runner(drafting, drafting=True), PROMPT, COUNT)
    assert len(whole.drafts) == COUNT + 1
    assert whole.drafts[0].logits.shape == (1, 3, 320)
    found = traces(drafting, size, expert_parallel, drafting=True)
    same_on_all(found)
    equal(found[0], whole)


def test_tied_embeddings(seeded: Seeded, tmp_path: Path) -> None:
    opened = Checkpoint.open(seeded("fp32"))
    params = json.loads((opened.path / "params.json").read_text())
    folder = tmp_path / "tied"
    with CheckpointWriter(folder) as writer:
        writer.add_json("params.json", {**params, "tied_embeddings": True})
        for name in opened.tensors:
            if not name.startswith("output"):
                writer.add(name, opened.read(name))
    whole = generate(open_runner(folder), PROMPT, 2)
    found = traces(folder, 4, count=2)
    same_on_all(found)
    equal(found[0], whole)


@pytest.mark.parametrize("place", ["embedding", "w_uv", "experts_w2", "output"])
def test_a_nan_of_one_rank_is_a_fault_of_all(seeded: Seeded, place: str) -> None:
    """None may go on: its tokens would be wrong, and it would wait for the others."""
    folder = seeded("fp32")

    def work(ranks: Collectives) -> str:
        runner = open_runner(folder, ranks, expert_parallel=place == "experts_w2")
        if ranks.rank == 1:
            _spoil(runner, place)
        try:
            generate(runner, list(range(40, 300, 3)), 1)
        except FaultError as error:
            return error.fault.code
        return "none"

    assert run_ranks(2, work) == ["nan", "nan"]


def _spoil(runner: ModelRunner, place: str) -> None:
    assert runner.weights is not None
    held = runner.weights.top if place in runner.weights.top else runner.weights.layers[1]
    data = held[place].data if isinstance(held[place], Weight) else held[place]
    data[: max(1, len(data) // 2)] = torch.nan


def test_what_ranks_hold(seeded: Seeded) -> None:
    """A rank of four has a quarter of the heads, its experts and its part of the vocabulary."""

    def work(ranks: Collectives) -> tuple[Any, ...]:
        runner = open_runner(seeded("bf16"), ranks, expert_parallel=True)
        assert runner.weights is not None
        moe, layer = runner.spec.layers[1].moe, runner.weights.layers[1]
        assert moe is not None
        assert runner.spec.vocab_size == runner.vocab_size == 320
        assert moe.experts == len(layer["gate"].data) == 5
        count = layer["experts_w13"].shape[0]
        return runner.spec.layers[1].heads, moe.first_expert, count, layer["wo"].shape

    found = run_ranks(4, work)
    assert found == [(2, 0, 2, (128, 128))] + [(2, first, 1, (128, 128)) for first in (2, 3, 4)]


class Three(SingleRank):
    world_size = 3


@pytest.mark.parametrize(("given", "size"), [(None, 1), (Three(), 3)])
def test_collectives_of_other_ranks_are_refused(given: Collectives | None, size: int) -> None:
    backend = CpuBackend()
    device = backend.probe().devices[0]
    model = build_model_spec(PRESETS["micro"].params())
    deployment = Deployment(model, device, tensor_parallel_size=2)
    session, capabilities = backend.open(deployment), backend.capabilities(device)
    with pytest.raises(ValueError, match=f"--tensor-parallel-size 2, .* are of {size}; works"):
        ModelRunner(session, "cpu", deployment, capabilities, collectives=given)
