"""A small ML4 of the true layer pattern, and the means to run single steps of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ml4core.api import Deployment, ModelSpec, StepOutput
from ml4core.cpu.backend import CpuBackend
from ml4core.engine import resolve
from ml4core.engine.runner import ModelRunner
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.seeded import make_seeded
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from support.stepping import Sequence, build_plan, plan_pools

TOPK = 16


class Rig:
    """A runner and the steps that tests take with it."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.spec: ModelSpec = runner.spec

    def sequence(self, ids: list[int], room: int | None = None) -> Sequence:
        sequence = Sequence(list(ids), len(ids))
        sequence.grow(self.runner.pools, room or len(ids), self.runner.block_size)
        return sequence

    def step(self, *work: tuple[Sequence, int], **options: object) -> StepOutput:
        """Runs one step; the result's logits are cloned."""
        plan = build_plan(list(work), tuple(self.runner.pools), self.runner.block_size, **options)  # type: ignore[arg-type]
        output = self.runner.step(plan)
        for sequence, rows in work:
            sequence.computed += rows
        return output

    def logits(self, ids: list[int], *chunks: int) -> torch.Tensor:
        """Logits of every position, computed in chunks (the last of which repeats)."""
        sequence = self.sequence(ids)
        found = []
        sizes = list(chunks) or [len(ids)]
        while sequence.computed < len(ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            rows = min(size, len(ids) - sequence.computed)
            found.append(self.step((sequence, rows), all_logits=True).logits)
        sequence.release(self.runner.pools)
        return torch.cat(found)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "seeded"
    return make_seeded(folder, format="fp32", hidden=128, topk=TOPK, experts=8)


@pytest.fixture(scope="session")
def short_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers: one of each kind at least."""
    folder = tmp_path_factory.mktemp("short") / "seeded"
    return make_seeded(folder, format="fp32", layers=8, hidden=128, topk=TOPK, experts=8)


MakeRig = Callable[..., Rig]


@pytest.fixture(scope="session")
def make_rig(checkpoint: Path) -> MakeRig:
    def make(
        *,
        kv: str = "fp32",
        index: str = "fp32",
        dtype: str = "float32",
        form: str = "auto",
        block_size: int = 16,
        tokens: int = 512,
        folder: Path = checkpoint,
        spec: ModelSpec | None = None,
    ) -> Rig:
        opened = Checkpoint.open(folder)
        spec = spec or load_model_spec(opened)
        backend = CpuBackend()
        device = backend.probe().devices[0]
        deployment = Deployment(
            model=spec,
            device=device,
            dtype=dtype,
            kv_layout=kv,
            index_layout=index,
            block_size=block_size,
            attention_config={"mla_form": form},
        )
        runner = ModelRunner(
            backend.open(deployment), "cpu", deployment, backend.capabilities(device)
        )
        runner.load(load_layers(opened, spec, getattr(torch, dtype)))
        layouts = {"latent": resolve.latent(deployment), "index": resolve.index(deployment)}
        runner.allocate_kv(plan_pools(spec, layouts, block_size, tokens, 4))
        return Rig(runner)

    return make


@pytest.fixture(scope="session")
def rig(make_rig: MakeRig) -> Rig:
    return make_rig()


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(64, 8192, (count,), generator=generator).tolist()


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    return tokens
