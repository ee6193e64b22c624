"""Collectives of threads and of processes, and a model that two processes share out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ml4core.api import Collectives, Deployment
from ml4core.cpu.backend import CpuBackend
from ml4core.engine.collectives import SingleRank, TorchCollectives, shard_of
from ml4core.engine.thread_ranks import run_ranks
from ml4core.models.layer_table import build_model_spec
from ml4core.models.seeded import make_seeded
from ml4core.models.seeded_config import PRESETS
from ml4core.models.shards import Shard

from .exchanges import PROMPT, calls, given
from .ranks import DIMS, generate, open_runner

CHILD = Path(__file__).with_name("rank_process.py")
TESTS = Path(__file__).parents[2]


def check(found: list[dict[str, torch.Tensor]]) -> None:
    xs = [given(rank) for rank in range(2)]
    for rank, one in enumerate(found):
        for dim in (0, 1, -1):
            assert torch.equal(one[f"gather {dim}"], torch.cat(xs, dim))
            assert torch.equal(one[f"scatter {dim}"], (xs[0] + xs[1]).chunk(2, dim)[rank])
            mine = torch.cat([x.chunk(2, dim)[rank] for x in xs], dim)
            assert torch.equal(one[f"exchange {dim}"], mine)
        assert torch.equal(one["sum"], (xs[0] + xs[1]).T)
        assert torch.equal(one["bf16"], (xs[0] + xs[1]).bfloat16())
        assert one["integers"].tolist() == [0, 1]


def test_threads() -> None:
    check(run_ranks(2, calls))


def test_a_thread_that_fails_ends_the_others() -> None:
    def work(ranks: Collectives) -> None:
        ranks.all_reduce(torch.ones(1))
        if ranks.rank == 2:
            raise KeyError("rank 2")
        ranks.all_reduce(torch.ones(1))

    with pytest.raises(KeyError, match="rank 2"):
        run_ranks(3, work)


def test_a_rank_that_stays_away_ends_the_others() -> None:
    def work(ranks: Collectives) -> None:
        if ranks.rank:
            ranks.all_reduce(torch.ones(1))

    with pytest.raises(threading.BrokenBarrierError):
        run_ranks(2, work, timeout_s=0.2)


def test_one_rank_does_nothing() -> None:
    x, one = torch.ones(3), SingleRank()
    for call in (one.all_reduce, one.all_gather, one.reduce_scatter, one.all_to_all):
        assert call(x) is x


def test_a_process_without_a_group_has_no_collectives() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="has joined no group of ranks; works: torch"):
        TorchCollectives()


def test_what_a_rank_has() -> None:
    device = CpuBackend().probe().devices[0]
    model = build_model_spec(PRESETS["micro"].params())
    deployment = Deployment(model, device, tensor_parallel_size=4)
    assert shard_of(Deployment(model, device), 0) == Shard()
    assert shard_of(deployment, 3) == Shard(3, 4)
    experts = Deployment(model, device, tensor_parallel_size=4, enable_expert_parallel=True)
    assert shard_of(experts, 3) == Shard(3, 4, 3, 4)
    with pytest.raises(ValueError, match="tp_rank 4 of tp_size 4"):
        shard_of(deployment, 4)


@pytest.mark.multiprocess
def test_two_processes(tmp_path: Path) -> None:
    folder = make_seeded(tmp_path / "m", format="nvfp4_ct", **DIMS)
    want = generate(open_runner(folder), PROMPT, 3)
    outs = [tmp_path / f"{rank}.pt" for rank in range(2)]
    words = [sys.executable, "-W", "ignore", CHILD, folder, tmp_path / "store"]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}"}
    running = [
        subprocess.Popen([*words, f"{rank}", out], env=environment) for rank, out in enumerate(outs)
    ]
    assert [process.wait(240) for process in running] == [0, 0]
    found = [torch.load(out) for out in outs]
    check([one["calls"] for one in found])
    assert torch.equal(found[0]["logits"], found[1]["logits"])
    for one in found:
        assert one["ids"] == want.ids
        logits = torch.stack([step.logits[0] for step in want.steps])
        torch.testing.assert_close(one["logits"], logits, rtol=2e-4, atol=2e-4)
