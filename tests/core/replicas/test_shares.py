"""What each rank of each replica has of the experts, and how rows of all meet them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.api import Deployment
from ml4core.cpu.backend import CpuBackend
from ml4core.engine import resolve
from ml4core.engine.args import EngineArgs
from ml4core.engine.collectives import SingleRank, shard_of
from ml4core.engine.llm import open_engine
from ml4core.engine.runner import ModelRunner
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.thread_ranks import ThreadRank, run_ranks
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.shards import WHOLE, Shard
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from ml4core.planning import kv
from ml4core.registry import Choice
from support.stepping import Sequence, build_plan

BLOCK_SIZE, TOKENS = 16, 64


def deployment(folder: Path, **flags: Any) -> Deployment:
    device = CpuBackend().probe().devices[0]
    spec = load_model_spec(Checkpoint.open(folder))
    return Deployment(spec, device, block_size=BLOCK_SIZE, **flags)


def test_ranks_are_those_of_a_replica_side_by_side(folder: Path) -> None:
    flags = {"tensor_parallel_size": 8, "data_parallel_size": 4, "enable_expert_parallel": True}
    one = deployment(folder, **flags, data_parallel_rank=2)
    shard = shard_of(one, 3)
    assert shard == Shard(3, 8, 19, 32, 2, 4)
    assert shard.experts(128) == range(76, 80)
    assert shard.part("wo") == (3, 8)
    assert shard.part("experts_w2") == (0, 1)
    cut = shard_of(replace(one, enable_expert_parallel=False), 3)
    assert cut.part("experts_w2") == (19, 32)
    assert cut.part("shared_w2") == (3, 8)


def test_a_session_that_spans_its_ranks_gets_its_replicas_share(folder: Path) -> None:
    flags = {"tensor_parallel_size": 8, "data_parallel_size": 4, "spanning_session": True}
    one = deployment(folder, **flags, data_parallel_rank=2, enable_expert_parallel=True)
    shard = shard_of(one, 0)
    assert shard.experts(128) == range(64, 96)
    assert shard.part("wo") == (0, 1)
    assert shard_of(replace(one, enable_expert_parallel=False), 0).part("experts_w13") == (2, 4)
    assert shard_of(replace(one, data_parallel_size=1, data_parallel_rank=0), 0) == WHOLE


def test_one_session_where_it_spans_the_ranks(folder: Path, choice: Choice) -> None:
    """No process is started, no group joined, and devices aren't counted."""
    found = choice.devices[0]
    words = found.capabilities.features | {"feature:spanning_session"}
    device = replace(found.device, torch_device="cpu:0")  # one that can't be shared
    able = replace(found, device=device, capabilities=replace(found.capabilities, features=words))
    made = []
    for ranks, one in ((1, choice), (8, replace(choice, devices=(able,)))):
        args = EngineArgs(
            str(folder),
            backend="cpu",
            tensor_parallel_size=ranks,
            enable_expert_parallel=True,
            max_model_len=64,
        )
        engine = open_engine(args, choice=one, tokens_each=64)
        params = SamplingParams(temperature=0.0, max_tokens=4)
        made.append(engine.generate([[5, 6, 7]], params)[0].token_ids)
        assert engine.runner.shard == WHOLE
        assert engine.alarms == ()
        told = engine.report().get("parallel", {})
        assert told.get("spanning_session", False) == engine.deployment.spanning_session
        assert engine.deployment.spanning_session == (ranks == 8)
        engine.close()
    assert made[0] == made[1]


class Apart:
    """The collectives of a replica's ranks: of consecutive threads, all of which call."""

    def __init__(self, ranks: ThreadRank, size: int) -> None:
        self._ranks = ranks
        self.world_size = size
        self.rank = ranks.rank % size
        self._first = ranks.rank - self.rank

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        chunks = self._ranks.all_gather(x.unsqueeze(0))
        return torch.cat(list(chunks[self._first : self._first + self.world_size]), dim)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        chunks = self._ranks.all_gather(x.unsqueeze(0))
        return chunks[self._first : self._first + self.world_size].sum(0)


class Across(Apart):
    """Those of one rank's counterparts in all replicas."""

    def __init__(self, ranks: ThreadRank, size: int) -> None:
        super().__init__(ranks, size)
        self._size = size
        self.world_size = ranks.world_size // size
        self.rank = ranks.rank // size

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        chunks = self._ranks.all_gather(x.unsqueeze(0))
        return torch.cat(list(chunks[self._ranks.rank % self._size :: self._size]), dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        chunks = self._ranks.all_gather(x.unsqueeze(0))
        own = chunks[self._ranks.rank % self._size :: self._size].sum(0)
        return own.chunk(self.world_size, dim)[self.rank]


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["width", "experts"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2)])
def test_rows_of_each_replica_meet_all_experts(
    folder: Path, tp: int, dp: int, expert_parallel: bool
) -> None:
    """Replicas with prompts of their own give the logits that each has alone."""
    checkpoint = Checkpoint.open(folder)
    prompts = [list(range(10 + 40 * replica, 30 + 40 * replica)) for replica in range(dp)]
    alone = [logits(checkpoint, deployment(folder), SingleRank(), None, one) for one in prompts]

    def rank(ranks: ThreadRank) -> torch.Tensor:
        replica = ranks.rank // tp
        own = deployment(
            folder,
            tensor_parallel_size=tp,
            data_parallel_size=dp,
            data_parallel_rank=replica,
            enable_expert_parallel=expert_parallel,
        )
        inside: Any = Apart(ranks, tp) if tp > 1 else SingleRank()
        return logits(checkpoint, own, inside, Across(ranks, tp), prompts[replica])

    for place, found in enumerate(run_ranks(tp * dp, rank)):
        torch.testing.assert_close(found, alone[place // tp], rtol=2e-4, atol=2e-4)


def logits(
    checkpoint: Checkpoint, own: Deployment, inside: Any, replicas: Any, prompt: list[int]
) -> torch.Tensor:
    """Those behind a prompt."""
    backend = CpuBackend()
    words = backend.capabilities(own.device)
    session = backend.open(own)
    runner = ModelRunner(session, "cpu", own, words, collectives=inside, replicas=replicas)
    runner.load(load_layers(checkpoint, own.model, torch.float32, shard=runner.shard))
    layouts = {"latent": resolve.latent(own), "index": resolve.index(own)}
    groups = kv.target_groups(own.model, layouts)
    runner.allocate_kv(kv.pools_for(groups, BLOCK_SIZE, TOKENS, 1))
    sequence = Sequence(list(prompt), len(prompt))
    sequence.grow(runner.pools, TOKENS, BLOCK_SIZE)
    plan = build_plan([(sequence, len(prompt))], tuple(runner.pools), BLOCK_SIZE)
    return runner.step(plan).logits[0]
